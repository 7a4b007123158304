package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Exec makes one round trip for commands. Each then has its answer or its error.
func Exec(ctx context.Context, rdb redis.UniversalClient, cmds []redis.Cmder) {
	if len(cmds) == 1 {
		if err := rdb.Process(ctx, cmds[0]); err != nil && cmds[0].Err() == nil {
			cmds[0].SetErr(err)
		}
		return
	}
	pipe := rdb.Pipeline()
	for _, cmd := range cmds {
		_ = pipe.Process(ctx, cmd) // queues it
	}
	_, err := pipe.Exec(ctx)
	if err == nil {
		return
	}
	// The commands for a server that refused the connection have no error. The other servers of a Ring may have answered
	// their commands. A script that was answered has a value.
	refused := !slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Err() != nil })
	for _, cmd := range cmds {
		script, ok := cmd.(interface{ Val() any })
		if cmd.Err() == nil && (!ok && refused || ok && script.Val() == nil) {
			cmd.SetErr(err)
		}
	}
}

// Commands sends single commands through a Queue. Commands that wait at the same time share a round trip. Each server
// of a Cluster or Ring has its own Queue, so that a silent server delays only the commands for its keys. The methods of
// Commands are safe for concurrent use. It need not be closed, because it holds no resources while no command is under
// way.
type Commands struct {
	rdb    redis.UniversalClient
	queue  func() *Queue[redis.Cmder] // makes a Queue
	queues sync.Map                   // *redis.Client → *Queue: by server
}

// NewCommands makes Commands that use a Redis client, which they never close. At most most round trips to a server are
// under way at once.
func NewCommands(rdb redis.UniversalClient, most int) *Commands {
	send := func(ctx context.Context, batch []*Request[redis.Cmder]) (time.Duration, error) {
		cmds := make([]redis.Cmder, len(batch))
		for i, r := range batch {
			cmds[i] = r.Body
		}
		began := time.Now()
		Exec(ctx, rdb, cmds)
		trip := time.Since(began)
		for _, r := range batch {
			r.Answer()
		}
		return trip, nil
	}
	return &Commands{rdb: rdb, queue: func() *Queue[redis.Cmder] { return NewQueue(send, most, nil, nil) }}
}

// Process sends a command and waits for its reply or for the end of ctx. In the latter case the command may have been
// sent, and its value must not be read.
func (c *Commands) Process(ctx context.Context, cmd redis.Cmder) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	owner, _ := OwnerOf(c.rdb, firstKey(cmd)) // without one, the call finds the server
	q := c.queueOf(owner)
	r := q.Request()
	r.Body = cmd
	if err := q.Do(ctx, r, Wait{Began: time.Now(), Deadline: deadline}); errors.Is(err, ErrFull) {
		return fmt.Errorf("%w: %w", redis.ErrPoolTimeout, err)
	} else if err != nil {
		return err
	}
	q.Release(r)
	return cmd.Err()
}

// queueOf returns the Queue of a server.
func (c *Commands) queueOf(server *redis.Client) *Queue[redis.Cmder] {
	if q, ok := c.queues.Load(server); ok {
		return q.(*Queue[redis.Cmder])
	}
	c.queues.Range(func(other, _ any) bool {
		if server := other.(*redis.Client); server != nil && HasLeft(server) {
			c.queues.Delete(other) // a caller that has found it a moment ago can still use it
		}
		return true
	})
	q, _ := c.queues.LoadOrStore(server, c.queue())
	return q.(*Queue[redis.Cmder])
}

// firstKey returns the first key of a script's call, or the key of another command. A command without keys has "".
func firstKey(cmd redis.Cmder) string {
	at := 1
	switch cmd.Name() {
	case "eval", "evalsha":
		at = 3
	}
	args := cmd.Args()
	if len(args) <= at {
		return ""
	}
	switch key := args[at].(type) {
	case string:
		return key
	case *string: // of a script's call
		return *key
	}
	return ""
}
