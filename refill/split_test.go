package refill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A later file has one template in place of two in the leader's older file. The leader leaves the buckets of the wider
// template in the active set, where replicas with the later file find them.
func TestALeaderWithAnOlderFileRemovesNoBucketsOfALaterTemplate(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := func(version int64, prefixes ...string) *policy.Templates {
			var list []policy.Template
			for _, prefix := range prefixes {
				list = append(list, policy.Template{Prefix: prefix,
					Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(20), Interval: interval}})
			}
			templates, err := policy.NewTemplates(version, list, nil)
			require.NoError(t, err)
			return templates
		}
		later := set(2, "user:")
		leader := r.startWith("old", true, 1, set(1, "user:", "user:vip:"))
		resign := leader.lead()
		time.Sleep(time.Second)
		standby := r.startWith("later", true, 2, later)
		leader.RecordVersion(2)
		time.Sleep(2 * time.Second)
		const key = "user:vip:1"
		require.True(t, r.server.takeTemplate(later.Of(key), key, 60).OK)
		time.Sleep(2 * time.Second)
		r.server.set(func() {
			require.True(t, r.server.active[lua.Shard{Prefix: "user:", Number: lua.ActiveShard(key)}][key])
			require.Greater(t, *r.server.buckets[key].Tokens, int64(30), "the bucket is refilled at twenty a second")
		})
		resign()
		leader.stop()
		standby.stop()
	})
}
