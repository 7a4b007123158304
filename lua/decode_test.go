package lua

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// LazySHA returns the hash of the lazy script, for measurements that call it without this package.
func LazySHA() string { return lazyScript.sha }

// TakesWords returns the words of a call of takes.
func TakesWords(takes ...Takes) []any {
	call := TakesCall{takes: takes}
	if err := call.write(); err != nil {
		panic(err)
	}
	script := takeScript
	if takes[0].Whole {
		script = takesScript
	}
	call.words[0], call.words[1] = "evalsha", script.sha
	return call.words
}

// answering is a client that replies to every command with a value or an error.
type answering struct {
	value any
	err   error
}

func (a answering) Process(_ context.Context, cmd redis.Cmder) error {
	switch cmd := cmd.(type) {
	case once:
		cmd.SetVal(a.value)
	case onceIntegers:
		values, err := integers(a.value)
		cmd.SetVal(values)
		if err != nil && a.err == nil {
			return err // as the client library refuses what it can't read
		}
	}
	cmd.SetErr(a.err)
	return a.err
}

// integers reads a list of integers.
func integers(v any) ([]int64, error) {
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("%w: %T for a list", ErrBadReply, v)
	}
	values := make([]int64, len(list))
	for i := range list {
		values[i], ok = list[i].(int64)
		if !ok {
			return nil, fmt.Errorf("%w: %T for a number", ErrBadReply, list[i])
		}
	}
	return values, nil
}

// calls has the functions that decode a reply, each with a reply that it accepts.
var calls = map[string]struct {
	good any
	call func(context.Context, Client) (any, error)
}{
	"Takes": {takesReply(6, 3, 0, 1000, 1, 2000, 100_000, 1, 7), func(ctx context.Context, c Client) (any, error) {
		return takesOf(ctx, c, Takes{Key: "b", Runs: []policy.Run{{N: 1, Count: 2}}, Whole: true, Terms: true})
	}},
	"TakesAlone": {[]any{int64(5)}, func(ctx context.Context, c Client) (any, error) {
		return takesOf(ctx, c, Takes{Key: "b", Runs: []policy.Run{{N: 1, Count: 2}}})
	}},
	"Return": {[]any{int64(1), int64(5), int64(0)},
		func(ctx context.Context, c Client) (any, error) { return Return(ctx, c, "b", 1, 0) }},
	"Peek": {[]any{int64(1), int64(5), int64(0), int64(1), int64(2), int64(3), int64(4), "", int64(0), int64(0), int64(0),
		int64(0), int64(0), int64(0), int64(0), int64(0)},
		func(ctx context.Context, c Client) (any, error) { return Peek(ctx, c, "b", 1) }},
	"Grant": {[]any{int64(1), int64(5), int64(0), int64(1), int64(2)},
		func(ctx context.Context, c Client) (any, error) { return Grant(ctx, c, "b", 1) }},
	"Reset": {[]any{int64(1), int64(5), int64(0), int64(1), int64(2)},
		func(ctx context.Context, c Client) (any, error) { return Reset(ctx, c, "b", 1) }},
	"Reserve": {[]any{int64(1), int64(5), int64(6), int64(7), int64(8), ""},
		func(ctx context.Context, c Client) (any, error) {
			return Reserve(ctx, c, "b", ReserveCall{ID: "x", N: 1, TTL: time.Second})
		}},
	"Settle": {[]any{int64(1), int64(5), int64(6), int64(0), int64(1), int64(2), int64(3), int64(4), int64(5), int64(6)},
		func(ctx context.Context, c Client) (any, error) { return Settle(ctx, c, "b", "x", 1) }},
	"Lease": {[]any{int64(1), int64(5), int64(6), int64(7), int64(8), int64(9), "3 0 1000 1 2000 100000"},
		func(ctx context.Context, c Client) (any, error) {
			return Lease(ctx, c, "b", LeaseCall{ID: "x", Seq: 1, TTL: time.Second})
		}},
	"Refill": {func() any {
		values := []any{int64(1), -int64(policy.StatusEarly)}
		for range 19 {
			values = append(values, int64(1))
		}
		return values
	}(), func(ctx context.Context, c Client) (any, error) { return Refill(ctx, c, "b", policy.Call{}) }},
	"Add": {int64(3), func(ctx context.Context, c Client) (any, error) { return Add(ctx, c, "b", 1, 2, 3) }},
}

func takesOf(ctx context.Context, c Client, b Takes) (TakesReply, error) {
	replies, err := new(TakesCall).Do(ctx, c, []Takes{b})
	if err != nil {
		return TakesReply{}, err
	}
	return replies[0], replies[0].Err
}

// takesReply returns the reply to a Whole call for one bucket. rest has the values after the expiry.
func takesReply(rest ...int64) []any {
	values := []any{int64(1_000), int64(codeDone), int64(5), int64(1), int64(2), int64(900), int64(0)}
	for _, n := range rest {
		values = append(values, n)
	}
	return values
}

func TestRepliesOfAnotherShapeAreBad(t *testing.T) {
	t.Parallel()
	for name, f := range calls {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := f.call(t.Context(), answering{value: f.good})
			require.NoError(t, err)
			if name == "TakesAlone" { // any single number is a valid reply
				return
			}
			bad := []any{nil, "OK", 1.5, []any{}, []any{nil}, []any{"1"}, []any{int64(99)}, []any{int64(-1)}, []any{int64(3)},
				[]any{int64(3), int64(6)}, []any{int64(2), int64(2), int64(2)}}
			if good, ok := f.good.([]any); ok {
				bad = append(bad, good[:len(good)-1], append(good[:len(good):len(good)], int64(1)))
				for i := range good {
					changed := append([]any(nil), good...)
					changed[i] = []any{}
					bad = append(bad, changed)
				}
			}
			for _, value := range bad {
				_, err := f.call(t.Context(), answering{value: value})
				require.ErrorIs(t, err, ErrBadReply, "%#v", value)
			}
		})
	}
	_, err := Return(t.Context(), answering{value: []any{int64(4)}}, "b", 1, 0)
	require.ErrorIs(t, err, ErrBadReply, "the reply for another era is too short")
	_, err = calls["Takes"].call(t.Context(), answering{value: takesReply(3, 1, 2, 3, 1, 0)})
	require.ErrorIs(t, err, ErrBadReply, "the policy is missing")
}

// FuzzReply decodes replies made of the input's bytes: numbers, texts, nothing
// and lists.
func FuzzReply(f *testing.F) {
	f.Add([]byte{}, "")
	f.Add([]byte{0, 5, 0, 5, 0, 5, 1, 0}, "3 0 1000 1 2000 100000")
	f.Add([]byte{0, 1, 0, 5, 1}, "x")
	f.Add([]byte{0, 3, 0, 2}, "")
	f.Add([]byte{2, 3, 4}, "")
	for status := policy.StatusApplied; status <= policy.StatusConflict; status++ {
		f.Add(append([]byte{0, 1, 0, byte(-status)}, make([]byte, 2*19)...), "")
	}
	f.Add([]byte{0, 1, 0, 5, 0, 1, 0, 1, 0, 1}, "")
	f.Fuzz(func(t *testing.T, shape []byte, text string) {
		var values []any
		for i := 0; i < len(shape); i++ {
			switch shape[i] % 5 {
			case 0:
				n := int64(0)
				if i+1 < len(shape) {
					i++
					n = int64(int8(shape[i]))
				}
				values = append(values, n)
			case 1:
				values = append(values, text)
			case 2:
				values = append(values, nil)
			case 3:
				values = append(values, []any{int64(1)})
			case 4:
				values = append(values, int64(-1<<63))
			}
		}
		for name, c := range calls {
			_, err := c.call(t.Context(), answering{value: values})
			if err == nil || errors.Is(err, ErrUnknownBucket) || errors.Is(err, ErrMalformedBucket) ||
				errors.Is(err, ErrOtherEra) || errors.Is(err, ErrIDInUse) || errors.Is(err, ErrNotHeld) {
				continue
			}
			require.ErrorIs(t, err, ErrBadReply, name)
		}
	})
}

func TestErrorsOfTheServerAreWrappedAndMatchable(t *testing.T) {
	t.Parallel()
	for name, f := range calls {
		for _, text := range []string{"OOM command not allowed when used memory > 'maxmemory'.",
			"READONLY You can't write against a read only replica.", "LOADING Redis is loading the dataset in memory"} {
			cause := redisError(text)
			_, err := f.call(t.Context(), answering{err: cause})
			require.ErrorIs(t, err, cause, name)
			require.ErrorContains(t, err, "refiller: ", name)
			prefix, _, _ := strings.Cut(text, " ")
			require.True(t, redis.HasErrorPrefix(err, prefix), "%s: %v", name, err)
		}
		_, err := f.call(t.Context(), answering{err: context.DeadlineExceeded})
		require.ErrorIs(t, err, context.DeadlineExceeded, name)
	}
}

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

func TestAmountsOutOfRangeAreRefusedBeforeTheyAreSent(t *testing.T) {
	t.Parallel()
	unreachable := answering{err: errors.New("sent")}
	for _, n := range []int64{-1 << 63, -1, 0, policy.MaxTokens + 1, 1<<63 - 1} {
		_, take := takesOf(t.Context(), unreachable, Takes{Key: "b", Runs: []policy.Run{{N: n, Count: 1}}})
		require.ErrorIs(t, take, ErrInvalidAmount, n)
		_, back := Return(t.Context(), unreachable, "b", n, 0)
		_, grant := Grant(t.Context(), unreachable, "b", n)
		for _, err := range []error{back, grant} {
			require.ErrorIs(t, err, ErrInvalidAmount, n)
			require.ErrorContains(t, err, fmt.Sprintf("%d tokens; want 1 to %d", n, int64(policy.MaxTokens)))
		}
	}
}

func TestEveryScriptOpensWithItsContract(t *testing.T) {
	t.Parallel()
	entries, err := files.ReadDir(".")
	require.NoError(t, err)
	scripts := map[string]bool{}
	for _, e := range entries {
		if e.IsDir() {
			continue
		}
		source, err := files.ReadFile(e.Name())
		require.NoError(t, err)
		name := strings.TrimSuffix(e.Name(), ".lua")
		scripts[name] = true
		contract := ""
		for line := range strings.Lines(string(source)) {
			if !strings.HasPrefix(line, "--") || strings.HasPrefix(line, "--#") {
				break
			}
			contract += line
		}
		require.Regexp(t, regexp.MustCompile(`(?s)^-- `+name+`: .*?\.\n`), contract, "the header says what the script does")
		for _, section := range []string{`\n-- KEYS +`, `\n-- ARGV +`, `\n-- Reply `} {
			require.Regexp(t, regexp.MustCompile(section), contract, e.Name())
		}
		most := `KEYS\[[5-9]`
		switch name {
		case "override": // of a refilled bucket and of a lazy one
			most = `KEYS\[[6-9]`
		case "takeonce": // with two keys of flows
			most = `KEYS\[[6-9]`
		case "reserve", "settle", "lease": // with two keys of reservations and leases, and two of flows
			most = `KEYS\[[8-9]`
		}
		require.NotRegexp(t, regexp.MustCompile(most), string(source),
			"a bucket has three keys and one more for its requests, and its template has two")
		text := strings.NewReplacer("call('TIME')", "", "'PEXPIRETIME'", "").Replace(string(source))
		for _, foreign := range []string{"struct.", "cmsgpack", "cjson", "bit.", "os.", "math.random", "redis.setresp",
			"TIME'", "'KEYS'"} {
			require.NotContains(t, text, foreign, e.Name())
		}
	}
	require.Len(t, scripts, len(allScripts))
	for _, s := range allScripts {
		require.True(t, scripts[s.name], s.name)
		require.NotContains(t, s.source, "\n--#include", s.name)
	}
}

// The pieces that several scripts include are in shared. They describe the formats that the scripts store.
func TestSharedPiecesSayWhatTheyAre(t *testing.T) {
	t.Parallel()
	entries, err := files.ReadDir("shared")
	require.NoError(t, err)
	require.NotEmpty(t, entries)
	formats := map[string][]string{
		"bucket.lua":      {"--   st ", "--   pol ", "--   out ", "era last_us index carry"},
		"outstanding.lua": {"id to record"},
	}
	for _, e := range entries {
		source, err := files.ReadFile("shared/" + e.Name())
		require.NoError(t, err)
		head, _, _ := strings.Cut(string(source), "\nlocal ")
		require.Regexp(t, `^-- Shared by the scripts `, head, e.Name())
		for _, field := range formats[e.Name()] {
			require.Contains(t, head, field, e.Name())
		}
	}
}

func TestCommandsAreSentOnce(t *testing.T) {
	t.Parallel()
	for _, s := range allScripts {
		require.True(t, s.command(t.Context(), words([]string{"k"}, nil), false).NoRetry(), s.name)
		require.True(t, s.command(t.Context(), words([]string{"k"}, nil), true).NoRetry(), s.name)
	}
}
