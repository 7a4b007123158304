package lua

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tokenrefill/refiller/policy"
)

// Errors of the calls.
var (
	// ErrUnknownBucket is returned when the bucket doesn't exist.
	ErrUnknownBucket = errors.New("refiller: unknown bucket")
	// ErrMalformedBucket is returned when one of the bucket's keys holds
	// something else, as when another program uses the same name.
	ErrMalformedBucket = errors.New("refiller: malformed bucket")
	// ErrOtherEra is returned when tokens of one era come back to another.
	ErrOtherEra = errors.New("refiller: bucket is in another era")
	// ErrInvalidAmount is returned for a number of tokens that can't be taken,
	// returned or granted: it must be 1 to policy.MaxTokens.
	ErrInvalidAmount = errors.New("refiller: invalid amount")
	// ErrIDInUse is returned when an id stands for something else: a reservation
	// of another number of tokens, one that has ended, or a lease.
	ErrIDInUse = errors.New("refiller: id is in use")
	// ErrNotHeld is returned when nothing is known of an id: what it stood for
	// ended a while ago, or never was.
	ErrNotHeld = errors.New("refiller: nothing is held under this id")
	// ErrInvalidID is returned for an id that is empty or longer than MaxIDLen
	// bytes.
	ErrInvalidID = errors.New("refiller: invalid id")
	// ErrInvalidTTL is returned for a time to hold tokens that is not from
	// policy.MinHold to policy.MaxHold.
	ErrInvalidTTL = errors.New("refiller: invalid time to hold tokens")
	// ErrBadReply is returned when a script answers what this version doesn't
	// know.
	ErrBadReply = errors.New("refiller: bad reply")
)

// Codes that open the reply of every script but add and refill.
const (
	codeDenied    = 0
	codeDone      = 1
	codeUnknown   = 2
	codeMalformed = 3
	codeOtherEra  = 4
	codeReused    = 5
	codeNotHeld   = 6
	codeTooMany   = 9
)

// reply reads a script's list one value after the other; the first mismatch
// sticks.
type reply struct {
	values []any
	err    error
}

func (r *reply) int() int64 {
	if r.err != nil {
		return 0
	}
	if len(r.values) == 0 {
		r.err = fmt.Errorf("%w: too short", ErrBadReply)
		return 0
	}
	n, ok := r.values[0].(int64)
	if !ok {
		r.err = fmt.Errorf("%w: %T for a number", ErrBadReply, r.values[0])
	}
	r.values = r.values[1:]
	return n
}

// terms reads a policy's text; nil if it is empty.
func (r *reply) terms() *policy.Terms {
	if r.err != nil {
		return nil
	}
	if len(r.values) == 0 {
		r.err = fmt.Errorf("%w: too short", ErrBadReply)
		return nil
	}
	text, ok := r.values[0].(string)
	r.values = r.values[1:]
	if !ok {
		r.err = fmt.Errorf("%w: no text for a policy", ErrBadReply)
		return nil
	}
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

func (r *reply) end() error {
	if r.err == nil && len(r.values) > 0 {
		r.err = fmt.Errorf("%w: %d values too many", ErrBadReply, len(r.values))
	}
	return r.err
}

// integerReply reads a list of integers one after the other.
type integerReply struct {
	values []int64
	read   int
	bad    bool // a value is none that the script answers
}

// next is the next value; 0 after the last one.
func (r *integerReply) next() int64 {
	r.read++
	if r.read > len(r.values) {
		return 0
	}
	return r.values[r.read-1]
}

// take is the next n values; fewer at the end.
func (r *integerReply) take(n int64) []int64 {
	from := min(r.read, len(r.values))
	r.read += int(min(max(n, 0), int64(len(r.values)+1)))
	return r.values[from:min(r.read, len(r.values))]
}

// good reports whether all values were read, and each made sense.
func (r *integerReply) good() bool { return !r.bad && r.read == len(r.values) }

// integers reads a list of nothing but integers.
func integers(v any) ([]int64, error) {
	list, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("%w: %T for a list", ErrBadReply, v)
	}
	values := make([]int64, len(list))
	for i := range list {
		if values[i], ok = list[i].(int64); !ok {
			return nil, fmt.Errorf("%w: %T for a number", ErrBadReply, list[i])
		}
	}
	return values, nil
}

// open reads the leading code, which is one of want, or one of those that mean
// the same everywhere: they become errors.
func open(v any, key string, want ...int64) (*reply, int64, error) {
	values, ok := v.([]any)
	if !ok {
		return nil, 0, fmt.Errorf("%w: %T for a list", ErrBadReply, v)
	}
	r := &reply{values: values}
	code := r.int()
	if r.err != nil {
		return nil, 0, r.err
	}
	switch {
	case slices.Contains(want, code):
		return r, code, nil
	case code == codeUnknown:
		if err := r.end(); err != nil {
			return nil, code, err
		}
		return nil, code, fmt.Errorf("%w %q", ErrUnknownBucket, key)
	case code == codeMalformed:
		n := r.int()
		if err := r.end(); err != nil {
			return nil, code, err
		}
		return nil, code, malformed(key, n)
	}
	return nil, code, fmt.Errorf("%w: code %d", ErrBadReply, code)
}

// checkAmount refuses numbers that would turn a script's sense around, as a
// negative take is an addition.
func checkAmount(n int64) error {
	if n < 1 || n > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens; want 1 to %d", ErrInvalidAmount, n, int64(policy.MaxTokens))
	}
	return nil
}

func malformed(key string, n int64) error {
	want := [...]string{"a whole number of tokens", "a whole number, the index", "the bucket's state", "the bucket's reservations and leases", "when they end"}
	if n < 1 || n > int64(len(want)) {
		return fmt.Errorf("%w: key number %d", ErrBadReply, n)
	}
	return fmt.Errorf("%w %q: the key %q does not hold %s", ErrMalformedBucket, key, heldKeys(key)[n-1], want[n-1])
}
