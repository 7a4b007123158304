package lua

import "context"

// Script is a Lua script of another package. Like the scripts of this package, it is sent only once, whatever the
// client's MaxRetries is. If the server replies that it doesn't know the script, the script has not run, and is sent
// again with its source. A Script is safe for concurrent use.
type Script struct{ script }

// NewScript makes a Script of source. In source, each line "--#include shared/NAME" is replaced by that file of shared.
// name appears in errors.
func NewScript(name, source string) *Script { return &Script{hashed(name, expand(source))} }

// Run calls the script once and returns its reply. After an error the script may have run.
func (s *Script) Run(ctx context.Context, c Client, keys []string, args ...any) (*Reply, error) {
	v, err := s.run(ctx, c, keys, args...)
	if err != nil {
		return nil, err
	}
	return readReply(v), nil
}

// Source returns the script's text, with all that it includes.
func (s *Script) Source() string { return s.source }
