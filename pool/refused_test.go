package pool

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Several grants are sent in one script call. The server refuses the whole call if one of the buckets is forbidden. The
// other grants must get through.
func TestABucketThatIsRefusedHoldsUpNoOtherGrants(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, admin *redis.Client){
		"Forbidden": func(t *testing.T, admin *redis.Client) {
			require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", "agent", "resetkeys", "%R~pool*", "%R~{pool*",
				"~pool[^7]*", "~{pool[^7]*", "~pool7?*", "~{pool7?}*").Err())
		},
		"NoBucket": func(t *testing.T, admin *redis.Client) {
			require.NoError(t, admin.Del(t.Context(), lua.ControlKey("pool7")).Err())
			require.NoError(t, admin.LPush(t.Context(), lua.ControlKey("pool7"), "x").Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, server := t.Context(), testenv.Redis(t)
			admin := server.Client()
			require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "agent", "on", ">pw", "+@all", "~*").Err())
			o := server.ClientOptions()
			o.Username, o.Password = "agent", "pw"
			rdb := redis.NewClient(o)
			t.Cleanup(func() { require.NoError(t, rdb.Close()) })
			settings := Settings{Version: 1}
			for i := range refillsPerCall {
				p := simPool(fmt.Sprint("pool", i))
				settings.Pools = append(settings.Pools, p)
				start := p.Start("eu", 1)
				create := policy.Call{Create: policy.CreateInitial, Terms: &start}
				made := lua.RefillBatch(ctx, admin, []lua.RefillCall{{Key: p.Name, Call: create}}, 1)[0]
				require.NoError(t, made.Err)
			}
			a := newAgent(AgentConfig{Region: "eu", Identity: "eu", Settings: settings, Timing: DefaultTiming()}, nil,
				redisBuckets{rdb}, 1)
			a.poll(ctx, false)
			spoil(t, admin)
			for _, p := range settings.Pools {
				terms := p.Start("eu", 0)
				terms.Fence = policy.Fence{Epoch: 5, Seq: 1}
				a.bucket(p.Name).terms = terms
			}
			require.True(t, a.apply(ctx))
			for name, b := range a.known {
				stored := lua.Tickets(ctx, admin, []string{name})[0]
				if name == "pool7" {
					require.NotEqual(t, b.terms.Fence, stored.Fence)
					require.Zero(t, b.fence)
					continue
				}
				require.NoError(t, stored.Err)
				require.Equal(t, b.terms.Fence, stored.Fence)
				require.Equal(t, b.terms.Fence, b.fence)
			}
		})
	}
}
