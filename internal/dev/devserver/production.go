//go:build production

package devserver

import "context"

// Embedded reports whether this build contains the servers.
const Embedded = false

// StartRedis returns ErrLeftOut.
func StartRedis(int) (*Server, error) { return nil, ErrLeftOut }

// StartEtcd returns ErrLeftOut.
func StartEtcd(context.Context, int, string) (*Server, error) { return nil, ErrLeftOut }
