package redisconn

import (
	"context"
	"fmt"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
)

// SetLogger sends the messages of go-redis to l at debug level, because failures of a call are in the error of the
// call. If l is nil, the messages are dropped. The setting is global to the process, so main makes it before it opens
// the first client.
func SetLogger(l hclog.Logger) {
	if l == nil {
		l = hclog.NewNullLogger()
	}
	redis.SetLogger(redisLogger{l})
}

type redisLogger struct{ hclog.Logger }

// Printf implements the logger of go-redis.
func (l redisLogger) Printf(_ context.Context, format string, args ...any) {
	if l.IsDebug() {
		l.Debug("redis client", "detail", fmt.Sprintf(format, args...))
	}
}
