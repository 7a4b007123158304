package engine

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// listen starts a server that answers each command that begins with word, and refuses all other commands with an error.
func listen(t *testing.T, word, refusal string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				answer := ""
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					switch line := lines.Text(); {
					case strings.HasPrefix(line, "*"): // the number of words that follow
						answer = ""
					case answer != "" || strings.HasPrefix(line, "$"): // the first word's length, or the rest
					default:
						answer = "-" + refusal + "\r\n"
						if line == word {
							answer = "+done\r\n"
						}
						_, _ = fmt.Fprint(conn, answer)
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// If one shard of a Ring refuses connections, the replies of the other shards are kept.
func TestAShardThatRefusesConnectionsFailsOnlyItsOwnCommands(t *testing.T) {
	const refusal = "WRONGPASS invalid username-password pair"
	refusing, answering := listen(t, "", refusal), listen(t, "eval", "ERR unknown command")
	rdb := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"refusing": refusing, "answering": answering}, MaxRetries: -1,
		NewClient: func(o *redis.Options) *redis.Client {
			o.DisableIdentity = true
			if o.Addr == refusing {
				o.Password = "secret"
			}
			return redis.NewClient(o)
		},
	})
	defer func() { require.NoError(t, rdb.Close()) }()
	ctx := context.Background()
	for name, others := range map[string]int{"only scripts": 0, "with commands that the other shard refuses": 20} {
		t.Run(name, func(t *testing.T) {
			var cmds []redis.Cmder
			for i := range 20 {
				cmds = append(cmds, redis.NewCmd(ctx, "eval", "", 1, fmt.Sprint("user:", i)))
			}
			for i := range others {
				cmds = append(cmds, redis.NewCmd(ctx, "incr", fmt.Sprint("user:", i)))
			}
			Exec(ctx, rdb, cmds)
			answered := 0
			for i, cmd := range cmds[:20] {
				shard, err := rdb.GetShardClientForKey(fmt.Sprint("user:", i))
				require.NoError(t, err)
				if shard.Options().Addr == refusing {
					require.Error(t, cmd.Err())
					continue
				}
				require.NoError(t, cmd.Err())
				answered++
			}
			require.Positive(t, answered)
			require.Less(t, answered, 20)
		})
	}
}

func TestAServerThatRefusesConnectionsFailsEveryCommand(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{
		Addr: listen(t, "", "WRONGPASS invalid username-password pair"), Password: "secret", MaxRetries: -1,
	})
	defer func() { require.NoError(t, rdb.Close()) }()
	ctx := context.Background()
	cmds := []redis.Cmder{redis.NewIntCmd(ctx, "unlink", "a"), redis.NewCmd(ctx, "eval", "", 1, "a")}
	Exec(ctx, rdb, cmds)
	for _, cmd := range cmds {
		require.ErrorContains(t, cmd.Err(), "WRONGPASS")
	}
}

// The Queue of a server that has left is removed when another server joins.
func TestCommandsForgetServersThatLeft(t *testing.T) {
	addrs := map[string]string{"first": listen(t, "eval", ""), "second": listen(t, "eval", "")}
	rdb := redis.NewRing(&redis.RingOptions{Addrs: addrs, NewClient: func(o *redis.Options) *redis.Client {
		o.DisableIdentity = true
		return redis.NewClient(o)
	}})
	defer func() { require.NoError(t, rdb.Close()) }()
	c := NewCommands(rdb, 8)
	queues := func() (n int) {
		for i := range 20 {
			key := fmt.Sprint("user:", i)
			require.NoError(t, c.Process(t.Context(), redis.NewCmd(t.Context(), "eval", "", 1, &key)))
		}
		c.queues.Range(func(any, any) bool {
			n++
			return true
		})
		return n
	}
	require.Equal(t, 2, queues())
	rdb.SetAddrs(map[string]string{"first": addrs["first"], "third": listen(t, "eval", "")})
	require.Equal(t, 2, queues())
}
