package lua

import (
	"context"
	"time"
)

// HeartbeatReply is the reply to a heartbeat.
type HeartbeatReply struct {
	Count int64 // consumers of the bucket that are alive, this one included
	Known bool  // this consumer already counted as alive before the call
}

// Heartbeat records that the consumer is alive, for the time ttl, and counts the bucket's consumers that are alive. A
// ttl below a millisecond counts as a millisecond, and one above a minute as a minute. The server's clock measures it.
// Heartbeat neither changes the bucket nor checks that it exists.
func Heartbeat(ctx context.Context, c Client, key, consumer string, ttl time.Duration) (HeartbeatReply, error) {
	args := []any{consumer, min(max(1, ttl.Milliseconds()), time.Minute.Milliseconds())}
	r, _, err := heartbeatScript.ask(ctx, c, []string{LiveKey(key)}, args, codeDone)
	if err != nil {
		return HeartbeatReply{}, err
	}
	reply := HeartbeatReply{Count: r.Int(), Known: r.Int() == 1}
	return reply, r.End()
}
