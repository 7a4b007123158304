package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// instead is a redis.Hook that takes the place of a server.
type instead func(ctx context.Context, cmd redis.Cmder) error

func (instead) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f instead) ProcessHook(redis.ProcessHook) redis.ProcessHook { return redis.ProcessHook(f) }

func (instead) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// silent is a server that doesn't answer, not even when the context is cancelled.
func silent(context.Context, redis.Cmder) error {
	time.Sleep(time.Minute)
	return ErrSilent
}

// knows is a server that knows the slots and the commands.
func knows(_ context.Context, cmd redis.Cmder) error {
	switch cmd := cmd.(type) {
	case *redis.ClusterSlotsCmd:
		cmd.SetVal([]redis.ClusterSlot{{End: 16383}})
	case *redis.CommandsInfoCmd:
		cmd.SetVal(map[string]*redis.CommandInfo{"get": {}})
	}
	return nil
}

func TestOthersAreAskedWhenAServerOfAClusterIsSilent(t *testing.T) {
	down := errors.New("down")
	refuses := func(context.Context, redis.Cmder) error { return down }
	slow := func(ctx context.Context, cmd redis.Cmder) error {
		time.Sleep(3 * othersAfter)
		return knows(ctx, cmd)
	}
	for name, tc := range map[string]struct {
		server instead
		others map[string]instead
		after  time.Duration
		err    error
		opened int
	}{
		"it answers":            {knows, map[string]instead{"a": knows}, 0, nil, 0},
		"it refuses":            {refuses, map[string]instead{"a": knows}, 0, down, 0},
		"it is silent":          {silent, map[string]instead{"a": silent, "b": refuses, "c": knows}, othersAfter, nil, 3},
		"it is slow":            {slow, map[string]instead{"a": silent, "b": refuses}, 3 * othersAfter, nil, 2},
		"all are silent":        {silent, map[string]instead{"a": silent}, time.Second, context.DeadlineExceeded, 1},
		"silent, and no others": {silent, nil, time.Second, context.DeadlineExceeded, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
				defer client.Close()
				opened := 0
				var addrs []string
				for addr := range tc.others {
					addrs = append(addrs, addr)
				}
				opens := make(chan struct{}, 2*len(addrs))
				AskOthers(client, redis.Options{}, addrs, func(o redis.Options) *redis.Client {
					opens <- struct{}{}
					other := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
					AskOthers(other, o, addrs, nil) // as the client of a node asks others, too
					other.AddHook(tc.others[o.Addr])
					return other
				})
				client.AddHook(tc.server)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				began := time.Now()
				slots := redis.NewClusterSlotsCmd(ctx, "cluster", "slots")
				require.ErrorIs(t, client.Process(ctx, slots), tc.err)
				require.Equal(t, tc.after, time.Since(began))
				require.ErrorIs(t, slots.Err(), tc.err)
				require.Equal(t, tc.err == nil, len(slots.Val()) == 1)
				synctest.Wait()
				for len(opens) > 0 {
					<-opens
					opened++
				}
				require.Equal(t, tc.opened, opened)
				ctx, cancel = context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				commands, err := client.Command(ctx).Result()
				require.ErrorIs(t, err, tc.err)
				require.Equal(t, tc.err == nil, len(commands) == 1)
				time.Sleep(time.Minute) // the silent servers end
			})
		})
	}
}

// The reads of a connection end with the deadline of their call, but not when the call is cancelled.
func TestAQuestionHasADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan time.Duration, 2)
		began := time.Now()
		hangs := instead(func(ctx context.Context, _ redis.Cmder) error {
			deadline, ok := ctx.Deadline()
			if !ok {
				deadline = began.Add(time.Hour)
			}
			time.Sleep(time.Until(deadline))
			ended <- time.Since(began)
			return ErrSilent
		})
		open := func() *redis.Client { return redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) }
		client := open()
		defer client.Close()
		AskOthers(client, redis.Options{}, []string{"a"}, func(redis.Options) *redis.Client {
			other := open()
			other.AddHook(hangs)
			return other
		})
		client.AddHook(hangs)
		ctx := context.WithoutCancel(t.Context())
		require.Error(t, client.Process(ctx, redis.NewClusterSlotsCmd(ctx, "cluster", "slots")))
		require.Equal(t, answeredWithin, <-ended)
		require.Equal(t, answeredWithin, <-ended)
	})
}

func TestOtherCommandsAreForTheirServerAlone(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	AskOthers(client, redis.Options{}, []string{"a"}, nil)
	client.AddHook(instead(func(context.Context, redis.Cmder) error {
		time.Sleep(2 * othersAfter)
		return nil
	}))
	require.NoError(t, client.Ping(t.Context()).Err())
}
