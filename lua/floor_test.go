package lua_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestRepliesSayWhetherAGrantIsInForce(t *testing.T) {
	t.Parallel()
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		floorIsReported(t, testenv.Redis(t).Client())
	})
	t.Run("Embedded", func(t *testing.T) {
		t.Parallel()
		_, rdb := embedded(t)
		floorIsReported(t, rdb)
	})
}

func floorIsReported(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	now := serverTime(ctx, t, rdb)
	for name, test := range map[string]struct {
		end, era int64
		want     int64 // GrantEra as reported
	}{
		"granted":     {now + 3_600_000_000, 77, 77},
		"over":        {now - 1, 77, 0},
		"another era": {now + 3_600_000_000, 76, 0},
		"none":        {1, 0, 0},
		"plain":       {0, 0, 0},
	} {
		terms := policy.Terms{
			Capacity: 100, Tokens: 1, Per: 1_000_000, Interval: 100_000, MaxElapsed: 2_000_000, GrantTokens: 50,
			GrantEnd: test.end, GrantEra: test.era,
		}
		index, tokens := int64(9), int64(20)
		store(ctx, t, rdb, name, policy.Bucket{Tokens: &tokens, Index: &index,
			Control: &policy.Control{Terms: terms, Era: 77, Index: 9, Last: now}})
		want := terms
		want.GrantEra = test.want

		many := func(n int64) *policy.Terms {
			r, err := takeWhole(ctx, rdb, lua.Takes{Key: name, Runs: one(n), Terms: true})
			require.NoError(t, err)
			return r.Terms
		}
		take := func(r lua.TakeReply, err error) *policy.Terms {
			require.NoError(t, err)
			return r.Terms
		}
		for how, reported := range map[string]*policy.Terms{
			"take":            take(takeOne(ctx, rdb, name, 1, true)),
			"take, denied":    take(takeOne(ctx, rdb, name, 90, true)),
			"upto":            take(takeUpTo(ctx, rdb, name, 1)),
			"many":            many(1),
			"many, denied":    many(90),
			"upto, the rest":  take(takeUpTo(ctx, rdb, name, 90)),
			"upto, and empty": take(takeUpTo(ctx, rdb, name, 1)),
		} {
			require.Equal(t, &want, reported, "%s: %s", name, how)
		}
	}
}
