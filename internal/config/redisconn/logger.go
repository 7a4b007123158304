package redisconn

import (
	"context"
	"fmt"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
)

// SetLogger sends what go-redis logs to l, at debug level: whatever concerns a call is in that call's error. A nil l
// drops it. The setting is global to the process, so main makes it, before the first client is opened.
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
