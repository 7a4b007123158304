package lua

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Step is a script call that has to be made before takes of a bucket can be repeated.
type Step struct {
	script *script
	words  []any
	read   func(value any) error
}

// Do makes the call.
func (s *Step) Do(ctx context.Context, c Client) error {
	cmd, err := send(ctx, c, s.script, s.words, command)
	if err != nil {
		return err
	}
	return s.read(cmd.Val())
}

// Command returns the command of the call, which the caller sends by itself or in a pipeline. If IsNoScript reports
// true for its error, the caller may send the command with the script's source.
func (s *Step) Command(ctx context.Context, source bool) redis.Cmder {
	return s.script.command(ctx, s.words, source)
}

// Read reads the reply to the command.
func (s *Step) Read(cmd redis.Cmder) error {
	if err := cmd.Err(); err != nil {
		return callError(s.script.name, err)
	}
	return s.read(cmd.(once).Val())
}
