package fetch

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A bucket of 60 tokens that gains ten an hour holds 20 and was refilled 90 minutes ago, under version 5 of the
// template. Its next take finds 35, of which the policy of a later version keeps some.
func TestPeekShowsWhatATakeUnderALaterTemplateFinds(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	rdb := testenv.Redis(t).Client()
	template := func(capacity int64, carry policy.CarryOver) policy.Template {
		return policy.Template{Prefix: "user:", Policy: policy.Policy{Capacity: capacity, CarryOver: carry,
			Rate: policy.Rate{Tokens: 10, Per: time.Hour}, Interval: time.Hour}}
	}
	inForce := template(60, policy.CarryKeep).Terms(policy.Fence{Epoch: 5})
	own := inForce
	own.Fence = policy.Fence{Epoch: policy.OwnEpoch, Seq: 1}
	configured := inForce
	configured.Template = false
	pool := configured
	pool.Pool = true
	pool.Version = 5
	pool.PoolsVersion = 5
	for name, tc := range map[string]struct {
		inForce         policy.Terms
		template        policy.Template
		version         int64
		tokens, limit   int64
		waits, switches bool
	}{
		"kept":                {inForce, template(100, policy.CarryKeep), 6, 35, 100, false, true},
		"clamped":             {inForce, template(30, policy.CarryKeep), 6, 30, 30, false, true},
		"in proportion":       {inForce, template(30, policy.CarryProportional), 6, 17, 30, false, true},
		"dropped":             {inForce, template(30, policy.CarryReset), 6, 0, 30, true, true},
		"the same policy":     {inForce, template(60, policy.CarryKeep), 6, 35, 60, false, true},
		"with its version":    {inForce, template(100, policy.CarryKeep), 5, 20, 60, false, false},
		"an older template":   {inForce, template(100, policy.CarryKeep), 4, 20, 60, false, false},
		"an override":         {own, template(100, policy.CarryKeep), 6, 20, 60, false, false},
		"a configured bucket": {configured, template(100, policy.CarryKeep), 6, 35, 100, false, true},
		"a pool's bucket":     {pool, template(100, policy.CarryKeep), 6, 20, 60, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			require.NoError(t, rdb.FlushAll(ctx).Err())
			_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &tc.inForce})
			require.NoError(t, err)
			require.NoError(t, rdb.Set(ctx, key, 20, 0).Err())
			refilled90MinutesAgo := time.Now().Add(-90 * time.Minute).UnixMicro()
			st := fmt.Sprintf("%16d %16d 1 0", refilled90MinutesAgo, refilled90MinutesAgo)
			require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", st).Err())
			before := rdb.HGetAll(ctx, lua.ControlKey(key)).Val()

			set, err := policy.NewTemplates(tc.version, []policy.Template{tc.template}, nil)
			require.NoError(t, err)
			reply, err := kindOf(set.Of(key), false).peek(ctx, rdb, key)
			require.NoError(t, err)
			require.Equal(t, tc.tokens, reply.Tokens)
			require.Equal(t, tc.limit, reply.Terms.Capacity)
			require.Equal(t, tc.waits, reply.Wait > 0)
			require.Equal(t, tc.switches, reply.Last > refilled90MinutesAgo)

			require.Equal(t, before, rdb.HGetAll(ctx, lua.ControlKey(key)).Val(), "nothing is written")
			require.EqualValues(t, 20, tokens(t, rdb, key))
		})
	}
}

// Faults and plain clients have left only some keys of a template's bucket with capacity 60. A peek shows the number of
// tokens that a take of everything gets at that moment.
func TestPeekShowsWhatATakeOfEverythingGets(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	rdb := testenv.Redis(t).Client()
	ctx := t.Context()
	terms := policy.Policy{Capacity: 60, Rate: policy.Rate{Tokens: 10, Per: time.Hour},
		Interval: time.Hour}.Terms(policy.Fence{Epoch: 5})
	terms.Template = true
	full, strict := terms, terms
	full.OnLoss = policy.LossFull
	strict.Strict = true
	do := func(args ...any) func() { return func() { require.NoError(t, rdb.Do(ctx, args...).Err()) } }
	all := func(steps ...func()) func() {
		return func() {
			for _, step := range steps {
				step()
			}
		}
	}
	noState := do("del", lua.ControlKey(key))
	noIndex := do("del", lua.IndexKey(key))
	nothing := all(noState, noIndex, do("del", key))
	add := all(do("incr", lua.IndexKey(key)), do("incrby", key, 5))
	for name, tc := range map[string]struct {
		inForce policy.Terms
		disturb func()
		want    map[int64]int64 // by the capacity of the template; if that isn't 60, it is the template's next version
	}{
		"unchanged":                  {terms, func() {}, map[int64]int64{60: 20, 100: 35, 30: 30}},
		"a foreign add":              {terms, add, map[int64]int64{60: 25, 100: 25, 30: 25}},
		"no tokens":                  {terms, do("del", key), map[int64]int64{60: 0, 100: 15, 30: 15}},
		"no tokens, full":            {full, do("del", key), map[int64]int64{60: 0, 100: 60, 30: 30}},
		"no index":                   {terms, noIndex, map[int64]int64{60: 20, 100: 35, 30: 30}},
		"no state":                   {terms, noState, map[int64]int64{60: 20, 100: 20, 30: 20}},
		"too much, no state":         {terms, all(noState, do("set", key, 200)), map[int64]int64{60: 60, 100: 100, 30: 30}},
		"an index alone":             {terms, all(noState, do("del", key)), map[int64]int64{60: 0, 100: 0, 30: 0}},
		"an index of 0 alone":        {terms, all(nothing, do("set", lua.IndexKey(key), 0)), map[int64]int64{60: 60}},
		"an empty key alone":         {terms, all(nothing, do("set", key, 0)), map[int64]int64{60: 60}},
		"a missing key, decremented": {terms, all(nothing, do("set", key, -1)), map[int64]int64{60: 59, 30: 29}},
		"nothing":                    {terms, nothing, map[int64]int64{60: 60, 100: 100}},
		"held":                       {strict, reserveTen(t, rdb, key), map[int64]int64{60: 10, 100: 25, 30: 20}},
		"held, no state":             {strict, all(reserveTen(t, rdb, key), noState), map[int64]int64{60: 10, 30: 10}},
	} {
		for capacity, want := range tc.want {
			where := fmt.Sprintf("%s, capacity %d", name, capacity)
			require.NoError(t, rdb.FlushAll(ctx).Err())
			_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &tc.inForce})
			require.NoError(t, err)
			require.NoError(t, rdb.Set(ctx, key, 20, 0).Err())
			ago := time.Now().Add(-90 * time.Minute).UnixMicro()
			require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", fmt.Sprintf("%16d %16d 1 0", ago, ago)).Err())
			require.NoError(t, rdb.HDel(ctx, lua.ControlKey(key), "out").Err())
			tc.disturb()

			p := policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 10, Per: time.Hour}, Interval: time.Hour,
				Strict: tc.inForce.Strict}
			version := int64(5)
			if capacity != 60 {
				version = 6
			}
			set, err := policy.NewTemplates(version, []policy.Template{{Prefix: "user:", Policy: p}}, nil)
			require.NoError(t, err)
			reply, err := kindOf(set.Of(key), false).peek(ctx, rdb, key)
			require.NoError(t, err, where)
			require.Equal(t, want, reply.Tokens, where)
			require.Equal(t, capacity, reply.Terms.Capacity, where)
			require.Equal(t, want == 0, reply.Wait > 0, where)

			taken, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: key, Whole: true,
				Template: lua.NewTemplate(set.Of(key), false), Runs: []policy.Run{{N: 1, Count: 1000, UpTo: true}}}})
			require.NoError(t, err, where)
			require.NoError(t, taken[0].Err, where)
			require.Equal(t, want, taken[0].Runs[0].Taken, where)
		}
	}
}

// reserveTen reserves ten tokens.
func reserveTen(t *testing.T, rdb *redis.Client, key string) func() {
	return func() {
		r, err := lua.Reserve(t.Context(), rdb, key, lua.ReserveCall{ID: "job", N: 10, TTL: time.Hour})
		require.NoError(t, err)
		require.True(t, r.OK)
	}
}
