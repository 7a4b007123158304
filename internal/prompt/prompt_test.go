package prompt_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/prompt"
	"github.com/tokenrefill/refiller/internal/testenv"
)

const patience = 20 * time.Second

func TestACallerReturnsWhenItsContextEndsWhateverTheSocketDoes(t *testing.T) {
	for name, honours := range map[string]bool{"sockets keep deadlines": true, "sockets ignore deadlines": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := testenv.Redis(t)
			rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: honours, ReadTimeout: time.Hour, PoolSize: 2 * prompt.Most, MaxRetries: -1})
			c := prompt.New(rdb)
			ping := func(ctx context.Context) error { return c.Process(ctx, redis.NewStatusCmd(ctx, "ping")) }
			require.NoError(t, ping(context.Background()))
			server.Pause()
			for cause, end := range map[string]func() (context.Context, context.CancelFunc){
				"a deadline": func() (context.Context, context.CancelFunc) {
					return context.WithTimeout(context.Background(), 20*time.Millisecond)
				},
				"a distant deadline, cancelled": func() (context.Context, context.CancelFunc) {
					ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
					time.AfterFunc(20*time.Millisecond, cancel)
					return ctx, cancel
				},
				"a cancellation": func() (context.Context, context.CancelFunc) {
					ctx, cancel := context.WithCancel(context.Background())
					time.AfterFunc(20*time.Millisecond, cancel)
					return ctx, cancel
				},
			} {
				ctx, cancel := end()
				done := make(chan error, 1)
				go func() { done <- ping(ctx) }()
				select {
				case err := <-done:
					require.Error(t, err, cause)
				case <-time.After(patience):
					require.Fail(t, "a caller waits on the socket", cause)
				}
				cancel()
				require.ErrorIs(t, ping(ctx), ctx.Err(), "nothing is sent for a context that has ended")
			}

			// The goroutines are bounded: who finds none waits for its context.
			var wg sync.WaitGroup
			for range prompt.Most + 10 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
					defer cancel()
					if err := ping(ctx); err == nil {
						t.Error("a paused server answers")
					}
				})
			}
			wg.Wait()
			require.NoError(t, rdb.Close(), "ends what still waits")
			server.Resume()
		})
	}
}

func TestAnswersComeBack(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	for _, o := range []*redis.Options{server.ClientOptions(), {Addr: server.Addr()}} {
		rdb := redis.NewClient(o)
		t.Cleanup(func() { _ = rdb.Close() })
		c := prompt.New(rdb)
		for _, limit := range []time.Duration{50 * time.Millisecond, patience} {
			for {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				cmd := redis.NewIntCmd(ctx, "incr", "n")
				err := c.Process(ctx, cmd)
				cancel()
				if err == nil {
					require.Positive(t, cmd.Val())
					break
				}
				require.ErrorIs(t, err, context.DeadlineExceeded, "a slow machine")
			}
		}
		bad := redis.NewIntCmd(t.Context(), "incr")
		require.ErrorContains(t, c.Process(t.Context(), bad), "wrong number of arguments")
	}
}
