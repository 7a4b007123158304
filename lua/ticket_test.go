package lua_test

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestATicketHasTheUsageOfAPoolsBucket(t *testing.T) {
	t.Parallel()
	withEmbedded(t, ticketReportsTheState)
}

func ticketReportsTheState(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	now := serverTime(ctx, t, rdb)
	terms := policy.Terms{
		Fence: policy.Fence{Epoch: 4, Seq: 2}, Pool: true, Version: 7, PoolsVersion: 3, Capacity: 100, Tokens: 10,
		Per: 1_000_000, Interval: 100_000, MaxElapsed: 2_000_000,
		GrantTokens: 50, GrantEnd: now + 3_600_000_000, GrantEra: 77,
	}
	index, tokens := int64(9), int64(20)
	pool := func() policy.Bucket {
		return policy.Bucket{Tokens: &tokens, Index: &index,
			Control: &policy.Control{Terms: terms, Era: 77, Index: 9, Last: now - 1_000_000}}
	}
	store(ctx, t, rdb, "pool", pool())
	plain := pool()
	plain.Control.Terms.Pool = false
	plain.Control.Terms.Version = 0
	plain.Control.Terms.PoolsVersion = 0
	plain.Control.Terms.GrantTokens = 0
	plain.Control.Terms.GrantEnd = 0
	plain.Control.Terms.GrantEra = 0
	plain.Control.Terms.Fence = policy.Fence{Epoch: 20261122}
	store(ctx, t, rdb, "plain", plain)
	require.NoError(t, rdb.Set(ctx, "foreign", 5, 0).Err())
	require.NoError(t, rdb.LPush(ctx, "broken", "x").Err())
	require.NoError(t, rdb.ScriptFlush(ctx).Err())

	read := func() []lua.TicketResult {
		return lua.Tickets(ctx, rdb, []string{"pool", "missing", "foreign", "broken", "plain"})
	}
	before := read()
	require.NoError(t, before[0].Err)
	require.GreaterOrEqual(t, before[0].Now, now)
	want := lua.Ticket{Now: before[0].Now, Version: policy.Version{Era: 77, Index: 9}, Terms: &terms, Fence: terms.Fence,
		Tokens: 20}
	require.Equal(t, want, before[0].Ticket)
	require.EqualValues(t, 20261122, before[4].Terms.FileVersion())
	require.Zero(t, before[4].Fence, "a plain bucket's version is not the fence of a grant")
	require.Equal(t, lua.TicketResult{Ticket: lua.Ticket{Now: before[1].Now}}, before[1],
		"the ticket of a missing bucket has the server's time")
	require.Equal(t, lua.TicketResult{Ticket: lua.Ticket{Now: before[2].Now, Tokens: 5}}, before[2])
	require.ErrorIs(t, before[3].Err, lua.ErrMalformedBucket)
	require.Empty(t, lua.Tickets(ctx, rdb, nil))

	for _, key := range []string{"pool", "plain"} {
		_, err := takeOne(ctx, rdb, key, 4, false)
		require.NoError(t, err)
		out, err := lua.Refill(ctx, rdb, key, policy.Call{Version: policy.Version{Era: 77, Index: 9}})
		require.NoError(t, err)
		require.Equal(t, policy.StatusApplied, out.Status)
		require.Positive(t, out.Added)
		reply, err := takeOne(ctx, rdb, key, 99, false)
		require.NoError(t, err)
		require.False(t, reply.OK)
		_, err = takeOne(ctx, rdb, key, 101, false) // can never be taken, so it isn't counted as demand
		require.NoError(t, err)
		_, err = takeUpTo(ctx, rdb, key, 100)
		require.NoError(t, err)
		_, err = takeUpTo(ctx, rdb, key, 7)
		require.NoError(t, err)
		after := read()
		if key == "plain" {
			require.Zero(t, after[4].Added+after[4].Denied, "plain buckets count neither added nor denied tokens")
			continue
		}
		require.Equal(t, out.Added, after[0].Added)
		require.EqualValues(t, 99+7, after[0].Denied)
		require.Equal(t, 20+after[0].Added-after[0].Tokens, reply.Remaining+4,
			"consumed is added less the change of the tokens")
	}
}

func TestATicketNamesTheKeyThatHoldsSomethingElse(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTicketNamesTheKeyThatHoldsSomethingElse)
}

func aTicketNamesTheKeyThatHoldsSomethingElse(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	names := []string{lua.TokensKey("b"), lua.ControlKey("b")}
	for _, name := range names {
		storeCase(ctx, t, rdb, "b", 100)
		require.NoError(t, rdb.Del(ctx, name).Err())
		require.NoError(t, rdb.LPush(ctx, name, "x").Err())
		err := lua.Tickets(ctx, rdb, []string{"b"})[0].Err
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", name))
	}
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.Del(ctx, lua.TokensKey("b")).Err())
	lost := lua.Tickets(ctx, rdb, []string{"b"})[0]
	require.NoError(t, lost.Err)
	require.Zero(t, lost.Tokens, "the bucket lost its tokens")
	require.NotNil(t, lost.Terms)
}

func TestTicketsOfAnUnavailableServerAreErrors(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t)
	rdb := s.Client()
	s.Kill()
	for _, r := range lua.Tickets(t.Context(), rdb, []string{"a", "b"}) {
		require.Error(t, r.Err)
	}
}

// Many tickets share script calls. If the server refuses the keys of one ticket, only that ticket has an error.
func TestATicketThatIsRefusedLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	admin := server.Client()
	keys := make([]string, 250)
	for i := range keys {
		keys[i] = fmt.Sprint("pool", i)
		require.NoError(t, admin.Set(ctx, keys[i], i, 0).Err())
	}
	require.NoError(t, admin.Do(ctx, "ACL", "SETUSER", "agent", "on", ">pw", "+@all", "~pool*", "~{pool*").Err())
	require.NoError(t, admin.Set(ctx, "other", 1, 0).Err())
	o := server.ClientOptions()
	o.Username, o.Password = "agent", "pw"
	rdb := redis.NewClient(o)
	defer func() { require.NoError(t, rdb.Close()) }()
	require.NoError(t, lua.Load(ctx, admin))
	for i, r := range lua.Tickets(ctx, rdb, keys) {
		require.NoError(t, r.Err)
		require.EqualValues(t, i, r.Tokens)
	}
	require.Equal(t, "calls=3", calls(ctx, t, admin, "evalsha"))

	for i, r := range lua.Tickets(ctx, rdb, append([]string{"other"}, keys...)) {
		if i == 0 {
			require.ErrorContains(t, r.Err, "NOPERM")
			continue
		}
		require.NoError(t, r.Err)
		require.EqualValues(t, i-1, r.Tokens)
	}
	require.ErrorContains(t, lua.Tickets(ctx, rdb, []string{"other"})[0].Err, "NOPERM")
}
