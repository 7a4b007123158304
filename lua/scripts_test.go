package lua_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// operations has the functions that call a script for one configured bucket. Their arguments fit the bucket of the test
// cases.
var operations = map[string]func(ctx context.Context, c lua.Client, key string) error{
	"Take": func(ctx context.Context, c lua.Client, key string) error {
		_, err := takeOne(ctx, c, key, 5, false)
		return err
	},
	"TakeWithTerms": func(ctx context.Context, c lua.Client, key string) error {
		_, err := takeOne(ctx, c, key, 5, true)
		return err
	},
	"TakeDenied": func(ctx context.Context, c lua.Client, key string) error {
		_, err := takeOne(ctx, c, key, 900, false)
		return err
	},
	"TakeOnce": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.TakeOnce(ctx, c, key, "request", policy.Run{N: 5, Count: 1}, time.Minute)
		return err
	},
	"TakeAll": func(ctx context.Context, c lua.Client, key string) error {
		_, _, err := lua.TakeAll(ctx, c, []lua.Demand{{Key: key, N: 5}})
		return err
	},
	"TakeUpTo": func(ctx context.Context, c lua.Client, key string) error {
		_, err := takeUpTo(ctx, c, key, 5)
		return err
	},
	"Return": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Return(ctx, c, key, 5, 0)
		return err
	},
	"Peek": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Peek(ctx, c, key, 5)
		return err
	},
	"Grant": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Grant(ctx, c, key, 5)
		return err
	},
	"Reset": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Reset(ctx, c, key, 5)
		return err
	},
	"Reserve": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Reserve(ctx, c, key, lua.ReserveCall{ID: "x", N: 5, TTL: time.Minute})
		return err
	},
	// The following operations find no record, which is a valid reply, too.
	"Settle": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Settle(ctx, c, key, "x", 5)
		if errors.Is(err, lua.ErrNotHeld) {
			return nil
		}
		return err
	},
	"Lease": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Lease(ctx, c, key, lua.LeaseCall{ID: "x", Seq: 1, Want: 5, TTL: time.Minute})
		return err
	},
	"Sweep": func(ctx context.Context, c lua.Client, key string) error {
		return lua.Sweep(ctx, c.(redis.UniversalClient), []string{key}, 10)[0].Err
	},
	"Refill": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Refill(ctx, c, key, policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}})
		return err
	},
	"Add": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Add(ctx, c, key, 5, 1000, buckettest.Index)
		return err
	},
}

func storeCase(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, tokens int64) policy.Bucket {
	t.Helper()
	b := buckettest.Bucket(tokens, serverTime(ctx, t, rdb), 100_000)
	store(ctx, t, rdb, key, b)
	return b
}

func TestEveryFunctionSurvivesAFlushedScriptCache(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for name, call := range operations {
		storeCase(ctx, t, rdb, name, 100)
		require.NoError(t, rdb.ScriptFlush(ctx).Err())
		require.NoError(t, call(ctx, rdb, name), name)
		require.NotEqual(t, int64(0), *loadHeld(ctx, t, rdb, name).Tokens, name)
	}
	require.NoError(t, rdb.ScriptFlush(ctx).Err())
	require.NoError(t, lua.Load(ctx, rdb))
	before := calls(ctx, t, rdb, "eval")
	for name, call := range operations {
		storeCase(ctx, t, rdb, name, 100)
		require.NoError(t, call(ctx, rdb, name), name)
	}
	require.Equal(t, before, calls(ctx, t, rdb, "eval"), "loaded scripts are called by their hash")
}

// calls returns how often the server ran a command.
func calls(ctx context.Context, t testing.TB, rdb *redis.Client, command string) string {
	t.Helper()
	stats, err := rdb.InfoMap(ctx, "commandstats").Result()
	require.NoError(t, err)
	count, _, _ := strings.Cut(stats["Commandstats"]["cmdstat_"+command], ",")
	return count
}

func batch(n int, terms *policy.Terms) []lua.RefillCall {
	c := make([]lua.RefillCall, n)
	for i := range c {
		c[i] = lua.RefillCall{Key: fmt.Sprintf("bucket%d", i), Call: policy.Call{Terms: terms, Create: policy.CreateInitial}}
	}
	return c
}

func TestRefillBatchRunsEachBucketOnceThoughTheCacheIsFlushed(t *testing.T) {
	t.Parallel()
	ctx, terms := t.Context(), buckettest.Terms()
	single := testenv.Redis(t).Client()
	cluster := testenv.Cluster(t).Client()
	for _, c := range []struct {
		name    string
		rdb     redis.UniversalClient
		perCall int
		flush   func() error
	}{
		{"Single", single, 1, func() error { return single.ScriptFlush(ctx).Err() }},
		{"SeveralPerCall", single, 7, func() error { return single.ScriptFlush(ctx).Err() }},
		{"AllInOneCall", single, 1000, func() error { return single.ScriptFlush(ctx).Err() }},
		{"Cluster", cluster, 1, func() error {
			return cluster.ForEachMaster(ctx, func(ctx context.Context,
				m *redis.Client) error {
				return m.ScriptFlush(ctx).Err()
			})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := batch(50, &terms)
			for _, b := range calls {
				require.NoError(t, c.rdb.Del(ctx, b.Key, lua.IndexKey(b.Key), lua.ControlKey(b.Key)).Err())
			}
			require.NoError(t, c.flush())
			for i, r := range lua.RefillBatch(ctx, c.rdb, calls, c.perCall) {
				require.NoError(t, r.Err, calls[i].Key)
				require.Equal(t, policy.StatusInitialised, r.Status)
				require.EqualValues(t, 1, r.Version.Index)
				b := load(ctx, t, c.rdb, calls[i].Key)
				require.EqualValues(t, 1, *b.Index, "the script ran once")
				require.Equal(t, r.Version, policy.Version{Era: b.Control.Era, Index: *b.Index},
					"results are in the order of the calls")
			}
		})
	}
}

func TestRefillBatchReturnsEachBucketsOwnError(t *testing.T) {
	t.Parallel()
	withEmbedded(t, refillBatchReportsTheErrorOfEachBucket)
}

func refillBatchReportsTheErrorOfEachBucket(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	terms := buckettest.Terms()
	calls := batch(5, &terms)
	require.NoError(t, rdb.Set(ctx, calls[2].Key, "something else", 0).Err())
	for _, perCall := range []int{1, 2, 5} {
		for i, r := range lua.RefillBatch(ctx, rdb, calls, perCall) {
			if i == 2 {
				require.ErrorIs(t, r.Err, lua.ErrMalformedBucket)
				require.ErrorContains(t, r.Err, `"bucket2"`)
				require.Equal(t, policy.StatusMalformed, r.Status)
				continue
			}
			require.NoError(t, r.Err)
		}
	}
	require.Empty(t, lua.RefillBatch(ctx, rdb, nil, 1))
	for _, r := range lua.RefillBatch(ctx, rdb, calls, 0) {
		require.ErrorContains(t, r.Err, "0 buckets per call; want at least 1")
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for _, r := range lua.RefillBatch(ended, rdb, calls, 2) {
		require.ErrorIs(t, r.Err, context.Canceled)
	}
}

func TestBatchesOnAClusterKeepToSlots(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := testenv.Cluster(t)
	terms := buckettest.Terms()
	rdb := c.Client()
	calls := batch(4, &terms)
	for i, key := range []string{"a", "b3", "b800", "b"} { // the middle two share a slot
		calls[i].Key = key
	}
	require.Equal(t, lua.Slot(calls[1].Key), lua.Slot(calls[2].Key))
	results := lua.RefillBatch(ctx, rdb, calls, 50)
	for i, r := range results {
		require.NoError(t, r.Err)
		b := load(ctx, t, rdb, calls[i].Key)
		require.Equal(t, policy.Version{Era: b.Control.Era, Index: *b.Index}, r.Version)
	}
	require.Equal(t, results[1].Now, results[2].Now, "one call refills both buckets")

	// While a slot moves, redirections are followed, and each call runs once.
	key := "moving"
	storeCase(ctx, t, rdb, key, 100)
	slot := c.Slot(key)
	require.Equal(t, slot, lua.Slot(key))
	for _, node := range c.Nodes() {
		if node != c.Owner(slot) {
			require.NoError(t, c.MoveSlot(slot, node))
			break
		}
	}
	taken, err := takeOne(ctx, rdb, key, 30, false)
	require.NoError(t, err)
	require.EqualValues(t, 70, taken.Remaining)
	r := lua.RefillBatch(ctx, c.Client(), []lua.RefillCall{{Key: key,
		Call: policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}}}}, 1)
	require.NoError(t, r[0].Err)
	require.EqualValues(t, buckettest.Index+1, r[0].Version.Index)
}

func TestKeysOfABucketShareASlot(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t)
	for _, key := range []string{"a", "user:42", "{", "{{", "a{b", "{a", "a{b{c", " ", "ключ",
		strings.Repeat("x", lua.MaxKeyLen), "\x00\xff{"} {
		require.NoError(t, lua.CheckKey(key))
		slot := c.Slot(lua.TokensKey(key))
		require.Equal(t, slot, c.Slot(lua.IndexKey(key)), "%q", key)
		require.Equal(t, slot, c.Slot(lua.ControlKey(key)), "%q", key)
		require.Equal(t, slot, lua.Slot(key), "%q", key)
	}
}

func FuzzCheckKey(f *testing.F) {
	for _, key := range []string{"", "a", "}", "a}b", "{a}", "{", strings.Repeat("x", 512), strings.Repeat("x", 513),
		"\x00", "\xff\xfe"} {
		f.Add(key)
	}
	// tag returns the part of a key that a Cluster hashes.
	tag := func(key string) string {
		if _, rest, found := strings.Cut(key, "{"); found {
			if t, _, closed := strings.Cut(rest, "}"); closed && t != "" {
				return t
			}
		}
		return key
	}
	f.Fuzz(func(t *testing.T, key string) {
		if err := lua.CheckKey(key); err != nil {
			require.ErrorIs(t, err, lua.ErrInvalidKey)
			require.True(t, key == "" || len(key) > lua.MaxKeyLen || strings.Contains(key, "}"))
			return
		}
		require.Equal(t, key, lua.TokensKey(key))
		require.Equal(t, key, tag(lua.TokensKey(key)))
		require.Equal(t, key, tag(lua.IndexKey(key)))
		require.Equal(t, key, tag(lua.ControlKey(key)))
	})
}

// readsIndex has the operations that read {K}.
var readsIndex = map[string]bool{"Refill": true, "Grant": true, "Reset": true, "Add": true, "Peek": true}

func TestAKeyOfAnotherKindIsMalformedAndStays(t *testing.T) {
	t.Parallel()
	withEmbedded(t, spoiled)
}

func spoiled(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	const key = "bucket"
	spoil := map[string]func(name string) error{
		"List":      func(name string) error { return rdb.LPush(ctx, name, 1).Err() },
		"Text":      func(name string) error { return rdb.Set(ctx, name, "many", 0).Err() },
		"Fraction":  func(name string) error { return rdb.Set(ctx, name, "1.5", 0).Err() },
		"Zeros":     func(name string) error { return rdb.Set(ctx, name, "007", 0).Err() },
		"TooLarge":  func(name string) error { return rdb.Set(ctx, name, "99999999999999999999", 0).Err() },
		"OtherHash": func(name string) error { return rdb.HSet(ctx, name, "st", "1 2 3", "pol", "x").Err() },
	}
	for place, name := range []string{lua.TokensKey(key), lua.IndexKey(key), lua.ControlKey(key)} {
		for kind, set := range spoil {
			for op, call := range operations {
				// A take that fits reads only the tokens, unless it asks for the policy. Add uses only two keys. Only operations
				// that use the index read it.
				if op == "Add" || place > 0 && op == "Take" || place == 1 && !readsIndex[op] {
					continue
				}
				where := fmt.Sprintf("%s of a %s in %s", op, kind, name)
				storeCase(ctx, t, rdb, key, 100)
				require.NoError(t, rdb.Del(ctx, name).Err())
				require.NoError(t, set(name), where)
				before := dump(ctx, t, rdb)
				err := call(ctx, rdb, key)
				require.ErrorIs(t, err, lua.ErrMalformedBucket, where)
				require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", name), where)
				require.Equal(t, before, dump(ctx, t, rdb), where)
			}
		}
	}
}

// dump returns all keys and values of the server.
func dump(ctx context.Context, t testing.TB, rdb redis.UniversalClient) map[string]string {
	t.Helper()
	all := map[string]string{}
	keys, err := rdb.Keys(ctx, "*").Result()
	require.NoError(t, err)
	for _, k := range keys {
		kind := rdb.Type(ctx, k).Val()
		value := map[string]redis.Cmder{
			"string": redis.NewCmd(ctx, "get", k), "list": redis.NewCmd(ctx, "lrange", k, 0, -1),
			"hash": redis.NewMapStringStringCmd(ctx, "hgetall", k), "set": redis.NewCmd(ctx, "smembers", k),
			"zset": redis.NewCmd(ctx, "zrange", k, 0, -1, "withscores"),
		}[kind]
		require.NoError(t, rdb.Process(ctx, value), kind)
		all[k] = value.String()
	}
	return all
}

func TestAnUnknownBucketLeavesNoKey(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anUnknownBucketLeavesNoKey)
}

func anUnknownBucketLeavesNoKey(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for name, call := range operations {
		if name == "Refill" || name == "Add" {
			continue
		}
		require.ErrorIs(t, call(ctx, rdb, "typo"), lua.ErrUnknownBucket, name)
	}
	out, err := lua.Refill(ctx, rdb, "typo", policy.Call{})
	require.NoError(t, err)
	require.Equal(t, policy.StatusUnknown, out.Status)
	require.Empty(t, dump(ctx, t, rdb))
	require.NoError(t, rdb.LPush(ctx, lua.ControlKey("typo"), 1).Err())
	_, err = takeOne(ctx, rdb, "typo", 1, false)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.Len(t, dump(ctx, t, rdb), 1, "a malformed bucket gets no tokens")
}

func TestAForeignBucketWithoutPolicyIsTakenFrom(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aForeignBucketWithoutPolicyIsTakenFrom)
}

func aForeignBucketWithoutPolicyIsTakenFrom(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	require.NoError(t, rdb.MSet(ctx, "b", 10, "{b}", 3).Err())
	r, err := takeOne(ctx, rdb, "b", 4, false)
	require.NoError(t, err)
	require.Equal(t, lua.TakeReply{OK: true, Taken: 4, Remaining: 6}, r)
	r, err = takeOne(ctx, rdb, "b", 1, true)
	require.NoError(t, err)
	require.Equal(t, lua.TakeReply{OK: true, Taken: 1, Remaining: 5}, r, "the reply has no policy")
	r, err = takeOne(ctx, rdb, "b", 6, true)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Negative(t, r.Wait, "the time of the next refill is unknown")
	require.Nil(t, r.Terms)
	require.Zero(t, r.Version, "the bucket's version is unknown")
	r, err = takeUpTo(ctx, rdb, "b", 9)
	require.NoError(t, err)
	require.Equal(t, lua.TakeReply{OK: true, Taken: 5}, r)
	r, err = takeUpTo(ctx, rdb, "b", 9)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Zero(t, r.Taken)
	r, err = takeOne(ctx, rdb, "b", 1, false)
	require.NoError(t, err, "an empty bucket with an index exists")
	require.False(t, r.OK)
	p, err := lua.Peek(ctx, rdb, "b", 1)
	require.NoError(t, err)
	require.Nil(t, p.Terms)
	require.Zero(t, p.Version)
	for _, err := range []error{operations["Return"](ctx, rdb, "b"), operations["Grant"](ctx, rdb, "b"),
		operations["Reset"](ctx, rdb, "b")} {
		require.ErrorIs(t, err, lua.ErrUnknownBucket, "the bucket's capacity is unknown")
	}
	require.Equal(t, "0", rdb.Get(ctx, "b").Val())
}

func TestATakeReturnsThePolicyWhenAskedOrDenied(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTakeReturnsThePolicyWhenAskedOrDenied)
}

func aTakeReturnsThePolicyWhenAskedOrDenied(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := storeCase(ctx, t, rdb, "b", 100)
	r, err := takeOne(ctx, rdb, "b", 40, false)
	require.NoError(t, err)
	require.Equal(t, lua.TakeReply{OK: true, Taken: 40, Remaining: 60}, r)
	r, err = takeOne(ctx, rdb, "b", 40, true)
	require.NoError(t, err)
	require.Equal(t, b.Control.Terms, *r.Terms)
	require.EqualValues(t, 20, r.Remaining)
	for _, with := range []bool{false, true} {
		r, err = takeOne(ctx, rdb, "b", 40, with)
		require.NoError(t, err)
		require.False(t, r.OK)
		require.EqualValues(t, 20, r.Remaining, "no tokens were taken")
		require.Equal(t, b.Control.Terms, *r.Terms)
		require.Equal(t, policy.Version{Era: buckettest.Era, Index: buckettest.Index}, r.Version)
		require.Equal(t, b.Control.Last, r.Last)
		require.GreaterOrEqual(t, r.Now, r.Last)
		require.Positive(t, r.Wait)
	}
	r, err = takeUpTo(ctx, rdb, "b", 50)
	require.NoError(t, err)
	require.EqualValues(t, 20, r.Taken)
	require.Equal(t, b.Control.Terms, *r.Terms)
	r, err = takeOne(ctx, rdb, "b", 1001, false)
	require.NoError(t, err)
	require.Negative(t, r.Wait, "more tokens than the capacity are never available")
}

func TestHugeAmountsStayExact(t *testing.T) {
	t.Parallel()
	withEmbedded(t, hugeAmountsStayExact)
}

func hugeAmountsStayExact(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	const most = policy.MaxTokens
	b := buckettest.Bucket(most, serverTime(ctx, t, rdb), 0)
	b.Control.Terms.Capacity = most
	store(ctx, t, rdb, "b", b)
	for _, n := range []int64{1, most / 2, most/2 - 1} {
		r, err := takeOne(ctx, rdb, "b", n, true)
		require.NoError(t, err)
		require.True(t, r.OK)
	}
	require.Equal(t, "0", rdb.Get(ctx, "b").Val())
	r, err := takeOne(ctx, rdb, "b", most, false)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Zero(t, r.Remaining)
	require.Equal(t, "0", rdb.Get(ctx, "b").Val())
	back, err := lua.Return(ctx, rdb, "b", most-1, 0)
	require.NoError(t, err)
	require.EqualValues(t, most-1, back.Remaining)
	back, err = lua.Return(ctx, rdb, "b", most, 0)
	require.NoError(t, err)
	require.Equal(t, lua.ReturnReply{Remaining: most, Clamped: most - 1}, back)
	grant, err := lua.Grant(ctx, rdb, "b", most)
	require.NoError(t, err)
	require.EqualValues(t, most, grant.Clamped)
	require.Equal(t, fmt.Sprint(int64(most)), rdb.Get(ctx, "b").Val())
	_, err = takeOne(ctx, rdb, "b", most+1, false)
	require.ErrorIs(t, err, lua.ErrInvalidAmount)
}

func TestAReturnToAnotherEraReturnsNothing(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aReturnToAnotherEraReturnsNothing)
}

func aReturnToAnotherEraReturnsNothing(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	r, err := lua.Return(ctx, rdb, "b", 5, buckettest.Era)
	require.NoError(t, err)
	require.EqualValues(t, 105, r.Remaining)
	for _, era := range []int64{buckettest.Era - 1, buckettest.Era + 1} {
		r, err = lua.Return(ctx, rdb, "b", 5, era)
		require.ErrorIs(t, err, lua.ErrOtherEra)
		require.EqualValues(t, 105, r.Remaining)
	}
	require.Equal(t, "105", rdb.Get(ctx, "b").Val())
}

func TestGrantAndResetCountAsOurWrites(t *testing.T) {
	t.Parallel()
	withEmbedded(t, grantAndResetCountAsOurWrites)
}

func grantAndResetCountAsOurWrites(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, c := range []struct {
		name   string
		call   func(key string) (lua.OperatorReply, error)
		want   lua.OperatorReply
		credit bool // credit that was due stays due
	}{
		{"Grant", func(key string) (lua.OperatorReply, error) { return lua.Grant(ctx, rdb, key, 25) },
			lua.OperatorReply{Tokens: 125}, true},
		{"GrantAboveCapacity", func(key string) (lua.OperatorReply, error) { return lua.Grant(ctx, rdb, key, 5000) },
			lua.OperatorReply{Tokens: 1000, Clamped: 4100}, true},
		{"Reset", func(key string) (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, key, 25) },
			lua.OperatorReply{Tokens: 25}, false},
		{"ResetAboveCapacity", func(key string) (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, key, 1500) },
			lua.OperatorReply{Tokens: 1000, Clamped: 500}, false},
		{"ResetToCapacity", func(key string) (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, key, -7) },
			lua.OperatorReply{Tokens: 1000}, false},
		{"ResetToZero", func(key string) (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, key, 0) },
			lua.OperatorReply{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			storeCase(ctx, t, rdb, c.name, 100)
			if !c.credit {
				b := load(ctx, t, rdb, c.name)
				b.Control.Terms.Interval = 60_000_000 // the calls below come within half of it
				store(ctx, t, rdb, c.name, b)
			}
			got, err := c.call(c.name)
			require.NoError(t, err)
			c.want.Version = policy.Version{Era: buckettest.Era, Index: buckettest.Index + 1}
			require.Equal(t, c.want, got, "the index rises by one")

			out, err := lua.Refill(ctx, rdb, c.name, policy.Call{Version: got.Version})
			require.NoError(t, err)
			if c.credit {
				require.Equal(t, policy.StatusApplied, out.Status, "the refill doesn't detect a foreign client")
				require.GreaterOrEqual(t, out.Elapsed, int64(100_000))
				require.GreaterOrEqual(t, out.Added+out.Clamped, int64(50))
				return
			}
			require.Equal(t, policy.StatusEarly, out.Status, "the time up to the reset is not credited")
			back(ctx, t, rdb, c.name, 30_000_000)
			out, err = lua.Refill(ctx, rdb, c.name, policy.Call{Version: got.Version})
			require.NoError(t, err)
			require.Equal(t, policy.StatusApplied, out.Status, "the refill doesn't detect a foreign client")

			// A refiller that knows the old index gets a stale reply.
			out, err = lua.Refill(ctx, rdb, c.name, policy.Call{Version: policy.Version{Era: buckettest.Era,
				Index: buckettest.Index}})
			require.NoError(t, err)
			require.Equal(t, policy.StatusStale, out.Status)
		})
	}
}

// back makes the bucket's last refill us µs earlier.
func back(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, us int64) {
	t.Helper()
	b := load(ctx, t, rdb, key)
	b.Control.Last -= us
	store(ctx, t, rdb, key, b)
}

func TestAForeignAddBeforeAGrantIsStillSeen(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aForeignAddBeforeAGrantIsStillSeen)
}

func aForeignAddBeforeAGrantIsStillSeen(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	index, err := lua.Add(ctx, rdb, "b", 50, 1000, buckettest.Index)
	require.NoError(t, err)
	require.EqualValues(t, buckettest.Index+1, index)
	granted, err := lua.Grant(ctx, rdb, "b", 5)
	require.NoError(t, err)
	require.EqualValues(t, buckettest.Index+1, granted.Version.Index, "the version has the index of the state")
	out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: granted.Version})
	require.NoError(t, err)
	require.Equal(t, policy.StatusForeign, out.Status)
	require.EqualValues(t, 155, out.Tokens, "the time that the foreign client credited is not credited again")
}

func TestGrantRestoresALostIndex(t *testing.T) {
	t.Parallel()
	withEmbedded(t, grantRestoresALostIndex)
}

func grantRestoresALostIndex(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.Del(ctx, "b", "{b}").Err())
	got, err := lua.Grant(ctx, rdb, "b", 5)
	require.NoError(t, err)
	require.Equal(t, lua.OperatorReply{Tokens: 5,
		Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index + 1}}, got)
	require.Equal(t, "8", rdb.Get(ctx, "{b}").Val())
}

func TestScriptsKeepExpiry(t *testing.T) {
	t.Parallel()
	withEmbedded(t, scriptsKeepExpiry)
}

func scriptsKeepExpiry(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	newer := buckettest.Terms()
	newer.Fence.Epoch++
	all := map[string]func(context.Context, lua.Client, string) error{
		"Switch": func(ctx context.Context, c lua.Client, key string) error {
			_, err := lua.Refill(ctx, c, key, policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index},
				Terms: &newer})
			return err
		},
		"RolledBack": func(ctx context.Context, c lua.Client, key string) error {
			_, err := lua.Refill(ctx, c, key, policy.Call{Version: policy.Version{Era: buckettest.Era + 5, Index: 99}})
			return err
		},
		"AddClamped": func(ctx context.Context, c lua.Client, key string) error {
			_, err := lua.Add(ctx, c, key, 5000, 1000, buckettest.Index)
			return err
		},
	}
	for name, call := range operations {
		all[name] = call
	}
	for name, call := range all {
		storeCase(ctx, t, rdb, name, 100)
		keys := []string{lua.TokensKey(name), lua.IndexKey(name), lua.ControlKey(name)}
		for _, k := range keys {
			require.NoError(t, rdb.Expire(ctx, k, time.Hour).Err())
		}
		require.NoError(t, call(ctx, rdb, name), name)
		for _, k := range keys {
			require.Greater(t, rdb.TTL(ctx, k).Val(), 50*time.Minute, "%s of %s", k, name)
		}
	}
}

func TestErrorsOfARealServerComeThrough(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	storeCase(ctx, t, rdb, "b", 100)
	before := load(ctx, t, rdb, "b")

	// Full memory: writes are refused before any of them is made.
	require.NoError(t, rdb.ConfigSet(ctx, "maxmemory", "1").Err())
	for name, call := range operations {
		if name == "Peek" || name == "Settle" || name == "Sweep" || name == "TakeDenied" { // they have nothing to write
			continue
		}
		err := call(ctx, rdb, "b")
		require.True(t, redis.HasErrorPrefix(err, "OOM"), "%s: %v", name, err)
	}
	require.NoError(t, rdb.ConfigSet(ctx, "maxmemory", "0").Err())
	require.Equal(t, before, load(ctx, t, rdb, "b"))

	// A user who may not read gets NOPERM. The bucket doesn't count as malformed.
	require.NoError(t, rdb.Do(ctx, "ACL", "SETUSER", "default", "-get", "-mget", "-hget", "-hmget", "-decrby").Err())
	for name, call := range operations {
		if name == "Add" {
			continue
		}
		err := call(ctx, rdb, "b")
		require.Error(t, err, name)
		require.NotErrorIs(t, err, lua.ErrMalformedBucket, name)
	}
	require.NoError(t, rdb.Do(ctx, "ACL", "SETUSER", "default", "+@all").Err())

	// A replica refuses writes.
	replica := testenv.Redis(t).Client()
	require.NoError(t, replica.ReplicaOf(ctx, "127.0.0.1", fmt.Sprint(server.Port())).Err())
	require.Eventually(t, func() bool { return replica.Exists(ctx, "b", "{b}", "{b}:ctl").Val() == 3 }, 20*time.Second,
		10*time.Millisecond)
	for name, call := range operations {
		if name == "Peek" { // it never writes
			continue
		}
		err := call(ctx, replica, "b")
		require.True(t, redis.HasErrorPrefix(err, "READONLY"), "%s: %v", name, err)
	}
}

// The data of a server that refuses writes, such as an old master, may be out of date. So calls return its error, even
// if they would write nothing. Refills are the exception: a reply to a refill that writes nothing is accepted, because
// the next refill writes.
func TestAServerThatMayNotWriteAnswersNothing(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	lazy := policy.Template{Policy: policy.Policy{Capacity: 100, Rate: policy.PerSecond(1)}}.Terms(policy.Fence{Epoch: 7})
	storeCase(ctx, t, rdb, "b", 100)
	storeCase(ctx, t, rdb, "full", 1000)
	storeDivided(ctx, t, rdb, "divided")
	run := policy.Run{N: 5, Count: 1}
	_, err := lua.TakeOnce(ctx, rdb, "b", "charged", run, time.Hour)
	require.NoError(t, err)
	_, _, err = lua.TakeAllOnce(ctx, rdb, "all", time.Hour, []lua.Demand{{Key: "b", N: 5}})
	require.NoError(t, err)
	for _, id := range []string{"held", "settled"} {
		_, err = lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: id, N: 5, TTL: time.Hour})
		require.NoError(t, err)
	}
	_, err = lua.Settle(ctx, rdb, "b", "settled", 5)
	require.NoError(t, err)
	block := lua.LeaseCall{ID: "block", Seq: 1, Want: 5, TTL: time.Hour}
	_, err = lua.Lease(ctx, rdb, "b", block)
	require.NoError(t, err)
	_, err = lua.LazyTake(ctx, rdb, "user:1", &lazy, one(100), false)
	require.NoError(t, err)

	calls := map[string]func(c lua.Client) error{
		"Take, denied": func(c lua.Client) error {
			_, err := takeOne(ctx, c, "b", 900, false)
			return err
		},
		"Take of no bucket": func(c lua.Client) error {
			_, err := takeOne(ctx, c, "none", 1, false)
			return err
		},
		"Takes for flows, denied": func(c lua.Client) error {
			_, err := takeFor(ctx, c, "b", "a", 900)
			return err
		},
		"Takes for flows of no bucket": func(c lua.Client) error {
			_, err := takeFor(ctx, c, "none", "a", 1)
			return err
		},
		"Plan that is stored already": func(c lua.Client) error {
			return planned(ctx, c.(redis.UniversalClient), "divided", listing(1))
		},
		"TakeOnce, denied": func(c lua.Client) error {
			_, err := lua.TakeOnce(ctx, c, "b", "new", policy.Run{N: 900, Count: 1}, time.Hour)
			return err
		},
		"TakeOnce, charged before": func(c lua.Client) error {
			_, err := lua.TakeOnce(ctx, c, "b", "charged", run, time.Hour)
			return err
		},
		"TakeOnce of no bucket": func(c lua.Client) error {
			_, err := lua.TakeOnce(ctx, c, "none", "new", run, time.Hour)
			return err
		},
		"TakeAll, denied": func(c lua.Client) error {
			_, _, err := lua.TakeAll(ctx, c, []lua.Demand{{Key: "b", N: 900}})
			return err
		},
		"TakeAll, charged before": func(c lua.Client) error {
			_, _, err := lua.TakeAllOnce(ctx, c, "all", time.Hour, []lua.Demand{{Key: "b", N: 5}})
			return err
		},
		"TakeAll of no bucket": func(c lua.Client) error {
			_, _, err := lua.TakeAll(ctx, c, []lua.Demand{{Key: "none", N: 1}})
			return err
		},
		"Return, clamped": func(c lua.Client) error {
			_, err := lua.Return(ctx, c, "full", 5, 0)
			return err
		},
		"Return to another era": func(c lua.Client) error {
			_, err := lua.Return(ctx, c, "full", 5, 99)
			return err
		},
		"Reserve, denied": func(c lua.Client) error {
			_, err := lua.Reserve(ctx, c, "b", lua.ReserveCall{ID: "new", N: 900, TTL: time.Hour})
			return err
		},
		"Reserve, again": func(c lua.Client) error {
			_, err := lua.Reserve(ctx, c, "b", lua.ReserveCall{ID: "held", N: 5, TTL: time.Hour})
			return err
		},
		"Settle, again": func(c lua.Client) error {
			_, err := lua.Settle(ctx, c, "b", "settled", 5)
			return err
		},
		"Settle what isn't held": func(c lua.Client) error {
			_, err := lua.Settle(ctx, c, "b", "none", 5)
			return err
		},
		"Lease, again": func(c lua.Client) error {
			_, err := lua.Lease(ctx, c, "b", block)
			return err
		},
		"Sweep, nothing due": func(c lua.Client) error {
			return lua.Sweep(ctx, c.(redis.UniversalClient), []string{"b"}, 10)[0].Err
		},
		"Grant to a full bucket": func(c lua.Client) error {
			_, err := lua.Grant(ctx, c, "full", 5)
			return err
		},
		"Grant to no bucket": func(c lua.Client) error {
			_, err := lua.Grant(ctx, c, "none", 5)
			return err
		},
		"LazyTake, denied": func(c lua.Client) error {
			_, err := lua.LazyTake(ctx, c, "user:1", &lazy, one(100), false)
			return err
		},
	}
	replica := testenv.Redis(t).Client()
	require.NoError(t, replica.ReplicaOf(ctx, "127.0.0.1", fmt.Sprint(server.Port())).Err())
	require.Eventually(t, func() bool { return replica.Exists(ctx, "{user:1}:lazy").Val() == 1 }, 20*time.Second,
		10*time.Millisecond)
	for name, call := range calls {
		require.False(t, redis.HasErrorPrefix(call(rdb), "READONLY"), name)
		err := call(replica)
		require.True(t, redis.HasErrorPrefix(err, "READONLY"), "%s: %v", name, err)
	}
	_, err = lua.LazyPeek(ctx, replica, "user:1", &lazy, 100)
	require.NoError(t, err, "a peek writes nothing")
	// A master that lost its replicas refuses writes if min-replicas-to-write is set, because another server may be the
	// master by now.
	require.NoError(t, rdb.ConfigSet(ctx, "min-replicas-to-write", "9").Err())
	for name, call := range calls {
		err := call(rdb)
		require.True(t, redis.HasErrorPrefix(err, "NOREPLICAS"), "%s: %v", name, err)
	}
	// The bucket of a server that can't write to its disk can't be refilled either.
	require.NoError(t, rdb.ConfigSet(ctx, "min-replicas-to-write", "0").Err())
	require.NoError(t, rdb.ConfigSet(ctx, "save", "3600 1").Err())
	require.NoError(t, os.RemoveAll(rdb.ConfigGet(ctx, "dir").Val()["dir"]))
	_ = rdb.BgSave(ctx) // it fails, at once or later
	require.Eventually(t, func() bool {
		return strings.Contains(rdb.Info(ctx, "persistence").Val(), "rdb_last_bgsave_status:err")
	}, 20*time.Second, 10*time.Millisecond)
	for name, call := range calls {
		err := call(rdb)
		require.True(t, redis.HasErrorPrefix(err, "MISCONF"), "%s: %v", name, err)
	}
}
