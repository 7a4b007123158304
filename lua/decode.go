package lua

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// Errors of the calls.
var (
	// ErrUnknownBucket is returned when the bucket doesn't exist.
	ErrUnknownBucket = errors.New("refiller: unknown bucket")
	// ErrMalformedBucket is returned when one of the bucket's keys holds something else, for example because another
	// program uses the same name.
	ErrMalformedBucket = errors.New("refiller: malformed bucket")
	// ErrOtherEra is returned when tokens are given back in another era than that in which they were taken.
	ErrOtherEra = errors.New("refiller: bucket is in another era")
	// ErrInvalidAmount is returned for a number of tokens that can't be taken,
	// returned or granted: it must be 1 to policy.MaxTokens.
	ErrInvalidAmount = errors.New("refiller: invalid amount")
	// ErrIDInUse is returned when an id is in use for something else: a reservation of another number of tokens, a
	// reservation that has ended, or a lease.
	ErrIDInUse = errors.New("refiller: id is in use")
	// ErrNotHeld is returned for an unknown id. Its reservation or lease ended some time ago, or never existed.
	ErrNotHeld = errors.New("refiller: nothing is held under this id")
	// ErrInvalidID is returned for an id that is empty or longer than MaxIDLen
	// bytes.
	ErrInvalidID = errors.New("refiller: invalid id")
	// ErrInvalidTTL is returned for a time to hold tokens that is not from
	// policy.MinHold to policy.MaxHold.
	ErrInvalidTTL = errors.New("refiller: invalid time to hold tokens")
	// ErrBadReply is returned when a script sends a reply that this version doesn't
	// know.
	ErrBadReply = errors.New("refiller: bad reply")
)

// Codes that are the first value in the replies of most scripts.
const (
	codeDenied    = 0
	codeDone      = 1
	codeUnknown   = 2
	codeMalformed = 3
	codeOtherEra  = 4
	codeReused    = 5
	codeNotHeld   = 6
	codeOfFlow    = 7
	codeTooMany   = 9
	codeSchedule  = 10
	codeEnded     = 11
)

// Reply reads the list that a script returned, one value after the other. After the first value that does not match,
// the methods return zero values, and End returns the error, ErrBadReply. A Reply is not safe for concurrent use.
type Reply struct {
	values []any
	err    error
}

// readReply returns a Reply of the value that a script returned.
func readReply(v any) *Reply {
	values, ok := v.([]any)
	if !ok {
		return &Reply{err: fmt.Errorf("%w: %T for a list", ErrBadReply, v)}
	}
	return &Reply{values: values}
}

// next returns the next value.
func next[T any](r *Reply, what string) (v T) {
	switch {
	case r.err != nil:
		return v
	case len(r.values) == 0:
		r.err = fmt.Errorf("%w: too short", ErrBadReply)
		return v
	}
	v, ok := r.values[0].(T)
	if !ok {
		r.err = fmt.Errorf("%w: %T for %s", ErrBadReply, r.values[0], what)
	}
	r.values = r.values[1:]
	return v
}

// Int returns the next value, a number; 0 after a mismatch.
func (r *Reply) Int() int64 { return next[int64](r, "a number") }

// count reads a counter. It comes as a text, because Lua's numbers could not represent a large counter exactly.
func (r *Reply) count() int64 {
	text := next[string](r, "a count")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("%w: %q for a count", ErrBadReply, text)
	}
	return n
}

// terms reads a policy's text; nil if it is empty.
func (r *Reply) terms() *policy.Terms {
	text := next[string](r, "a policy")
	if text == "" {
		return nil
	}
	t, err := policy.DecodeTerms(text)
	if err != nil {
		r.err = fmt.Errorf("%w: %w", ErrBadReply, err)
		return nil
	}
	return &t
}

// More reports whether there is another value, and no mismatch so far.
func (r *Reply) More() bool { return r.err == nil && len(r.values) > 0 }

// End returns an error if a value did not match, or if there are values that were not read.
func (r *Reply) End() error {
	if r.More() {
		r.err = fmt.Errorf("%w: %d values too many", ErrBadReply, len(r.values))
	}
	return r.err
}

// fail returns err, the meaning of the whole reply, unless the reply has more values.
func (r *Reply) fail(err error) error {
	if bad := r.End(); bad != nil {
		return bad
	}
	return err
}

// integerReply reads a list of integers one after the other.
type integerReply struct {
	values []int64
	read   int
	bad    bool // a value was read that the script never returns
}

// next returns the next value; 0 after the last one.
func (r *integerReply) next() int64 {
	r.read++
	if r.read > len(r.values) {
		return 0
	}
	return r.values[r.read-1]
}

// take returns the next n values, or fewer if the list ends before.
func (r *integerReply) take(n int64) []int64 {
	from := min(r.read, len(r.values))
	r.read += int(min(max(n, 0), int64(len(r.values)+1)))
	return r.values[from:min(r.read, len(r.values))]
}

// good reports whether all values were read, and each made sense.
func (r *integerReply) good() bool { return !r.bad && r.read == len(r.values) }

// ask calls the script and opens its reply.
func (s *script) ask(ctx context.Context, c Client, keys []string, args []any, want ...int64) (*Reply, int64, error) {
	v, err := s.run(ctx, c, keys, args...)
	if err != nil {
		return nil, 0, err
	}
	return open(v, keys, want...)
}

// askExisting is like ask, for a script that returns codeUnknown if none of its keys exists. While a slot moves, a
// Cluster doesn't run a script with missing keys. Then askExisting checks one by one whether the keys exist.
func (s *script) askExisting(ctx context.Context, c Client, keys []string, args []any, want ...int64) (*Reply, int64,
	error) {
	r, code, err := s.ask(ctx, c, keys, args, want...)
	if !IsTryAgain(err) {
		return r, code, err
	}
	for _, key := range keys {
		there, existsErr := exists(ctx, c, key)
		if existsErr != nil {
			return nil, 0, fmt.Errorf("refiller: %s: %w", s.name, existsErr)
		}
		if there {
			return nil, 0, err
		}
	}
	return nil, codeUnknown, unknown(keys)
}

// exists reports whether a key exists.
func exists(ctx context.Context, c Client, key string) (bool, error) {
	cmd := redis.NewIntCmd(ctx, "exists", key)
	if err := c.Process(ctx, cmd); err != nil { // cmd is not read: the client may still be writing to it
		return false, err
	}
	return cmd.Val() > 0, nil
}

func unknown(keys []string) error { return fmt.Errorf("%w %q", ErrUnknownBucket, bucketOf(keys[0])) }

// open reads the code at the beginning of the reply to a call with these keys. It returns a code that is in want.
// codeUnknown and codeMalformed, which have the same meaning for all scripts, become errors unless they are in want.
// Any other code is ErrBadReply.
func open(v any, keys []string, want ...int64) (*Reply, int64, error) {
	r := readReply(v)
	code := r.Int()
	if r.err != nil {
		return nil, 0, r.err
	}
	if slices.Contains(want, code) {
		return r, code, nil
	}
	var err error
	switch code {
	case codeUnknown:
		err = unknown(keys)
	case codeMalformed:
		err = malformed(keys, r.Int())
	default:
		return nil, code, fmt.Errorf("%w: code %d", ErrBadReply, code)
	}
	return nil, code, r.fail(err)
}

// checkAmount refuses numbers that aren't from 1 to policy.MaxTokens. A script would add tokens for a negative take.
func checkAmount(n int64) error { return checkFrom(1, n) }

func checkFrom(least, n int64) error {
	if n < least || n > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens; want %d to %d", ErrInvalidAmount, n, least, int64(policy.MaxTokens))
	}
	return nil
}

// checkTake is like checkAmount, for a take that leaves some tokens.
func checkTake(n int64, leave policy.Leave) error {
	if err := leave.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidAmount, err)
	}
	return checkAmount(n)
}

// malformed returns the error for the nth key of a call, which holds something else.
func malformed(keys []string, n int64) error {
	if n < 1 || n > int64(len(keys)) {
		return fmt.Errorf("%w: key number %d", ErrBadReply, n)
	}
	return malformedKey(keys[n-1])
}

func malformedKey(key string) error {
	return fmt.Errorf("%w %q: the key %q does not hold %s", ErrMalformedBucket, bucketOf(key), key, contentOf(key))
}
