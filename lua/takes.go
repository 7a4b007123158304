package lua

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// MaxTakes is the most buckets of one call of takes.
const MaxTakes = 1000

// Takes are the takes that a call makes of one bucket. They are made one after the other, and each is all or nothing.
//
// By default a call reads only the bucket's tokens. It then makes all takes or, if they don't all fit, none. In the
// second case nothing was written and the reply is Missed. Then the caller makes the same takes again with Whole set.
// If the bucket is expected to deny, or if its state is needed, set Whole at once.
type Takes struct {
	Key    string
	Runs   []policy.Run // at least one, unless Template is set: without runs the bucket is opened for another script
	InLine bool         // after a take that doesn't fit, no further one is made
	// Below makes the reply Missed if the bucket holds this number of tokens or more; 0 for no bound. For the bucket of a
	// refilled template it is the capacity that the caller knows, because a take from a full bucket has to be Whole.
	Below int64

	Whole bool // read all of the bucket: count denials, and return its state
	Terms bool // Whole: return the policy even if all takes are made
	// Template is the template of the bucket, unless that is a lazy one; nil for a bucket of no template. A Whole call
	// creates the bucket if it is missing.
	Template *Template
	// Existing is for a bucket of a template: a bucket that is missing isn't created. The call then has only the bucket's
	// own keys, and not the key of the override, which only a creation needs. So a Cluster serves it while the bucket's
	// slot moves.
	Existing bool
	// Hold is for a bucket of a template: how long the script for which the bucket is opened may hold tokens. The bucket
	// lives for longer than that.
	Hold time.Duration

	// Schedule is for a budget: the text of its schedule, from the Schedule of a reply. If it is empty, the call has the
	// schedule that the template remembers.
	Schedule string
	// Swept is for a budget: the caller has just swept the reservations and leases whose time is over.
	Swept bool

	// Lazy is the policy of the template, if it is a lazy one. The takes of such a bucket need a call for this bucket
	// only, and are never Missed.
	Lazy *policy.Terms
	// Resolved means that the caller has just read the bucket's override. Then Lazy is the override or, if there is none,
	// the template's policy. The call leaves out the key of the override, so that a Cluster serves it while the bucket's
	// slot moves.
	Resolved bool
}

// RunReply is the result of a run of takes.
type RunReply struct {
	Taken int64         // how many of its takes were made: the first ones
	Wait  time.Duration // as in TakeReply, for the bucket as the call's last run left it; 0 if all takes were made
	Paid  int64         // for a flow's run: as in TakeReply, for tokens of its first takes
}

// TakesReply is the result of the takes of one bucket.
type TakesReply struct {
	Missed    bool  // nothing was taken or written: make the same takes with Whole set
	OK        bool  // all takes were made
	Remaining int64 // tokens left after the last take
	// Schedule and Ended are for a budget. If one of them is set, nothing was taken. If Schedule is not empty, the caller
	// makes the takes again with it. If Ended is set, the caller sweeps the bucket and makes the takes again with Swept.
	Schedule string
	Ended    bool
	// The fields of a Whole call.

	// Runs are in the order of the call. If OK is set, they are nil, unless flows paid for only some of the tokens.
	Runs []RunReply
	// Paid is for the case that OK is set and Runs is nil. If it is true, flows paid for all tokens with their rights.
	// Otherwise they paid for none.
	Paid bool
	// Terms is the policy, if OK is false or the caller asked for it; nil if the bucket has none. Its GrantEra is 0 unless
	// a grant is in force.
	Terms *policy.Terms
	Refilled
	// Till is set if the template's sets are in other slots than the bucket: the second in which the bucket expires, to be
	// passed to Template.Enter. Otherwise it is 0.
	Till int64
	// Err is an error of this bucket only: ErrUnknownBucket, ErrMalformedBucket or ErrTooManyBuckets. Nothing was taken
	// from the bucket.
	Err error
}

// TakesCall makes calls that take from several buckets. It keeps what a call needs
// for the next one, so it serves one goroutine at a time. The zero TakesCall is
// ready.
type TakesCall struct {
	words     []any
	takes     []Takes
	templates []*Template
	replies   []TakesReply
	cmd       redis.Cmder
}

// Do makes the takes of several buckets in one call. The replies are in the order of takes and valid until the next
// call. These conditions apply:
//
//   - There are at most MaxTakes buckets, each with another key.
//   - Either all of them are Whole or none is.
//   - On a Cluster all of them are in one slot.
//   - A lazy bucket is the only one of its call.
//
// An error means that the call failed as a whole. If it is an error reply of the server, nothing was taken. If it is
// ErrInvalidAmount, nothing was sent.
func (t *TakesCall) Do(ctx context.Context, c Client, takes []Takes) ([]TakesReply, error) {
	command := func(source bool) (redis.Cmder, error) { return t.Command(ctx, takes, source) }
	return doTakes(ctx, c, command, t.Read)
}

// Command returns the command of a call that Do would make. The caller sends it once, by itself or in a pipeline. If
// IsNoScript reports true for its error, the caller may send the command with the script's source. Neither takes nor
// the values that they point to may change before Read.
func (t *TakesCall) Command(ctx context.Context, takes []Takes, source bool) (redis.Cmder, error) {
	t.takes = takes
	if b := t.lazy(); b != nil {
		words, err := lazyWords(b.Key, lazyTake, b.Lazy, b.Resolved, b.Runs, b.InLine)
		if err != nil {
			return nil, err
		}
		t.cmd = lazyScript.command(ctx, words, source)
		return t.cmd, nil
	}
	if err := t.write(); err != nil {
		return nil, err
	}
	script := takeScript
	if t.takes[0].Whole {
		script = takesScript
	}
	t.words[0], t.words[1] = script.by(source)
	t.cmd = integersCommand(ctx, t.words)
	return t.cmd, nil
}

// lazy returns the bucket of the call if it is a lazy one; otherwise nil.
func (t *TakesCall) lazy() *Takes {
	if len(t.takes) == 1 && t.takes[0].Lazy != nil {
		return &t.takes[0]
	}
	return nil
}

// Read reads the reply to the command. err is the error with which the command ended.
func (t *TakesCall) Read(err error) ([]TakesReply, error) {
	b := t.lazy()
	switch {
	case err != nil:
		return nil, callError("takes", err)
	case b == nil:
		return t.read(t.cmd.(onceIntegers).Val())
	}
	r, err := decodeLazy(t.cmd.(once).Val(), b.Key, b.Runs)
	r.Err = err
	if r.Terms == nil && (b.Whole || !r.OK) {
		r.Terms = b.Lazy
	}
	t.replies = append(t.replies[:0], r.TakesReply)
	return t.replies, nil
}

// IsNoScript reports whether an error means that the server doesn't know the script. Then nothing ran.
func IsNoScript(err error) bool { return redis.HasErrorPrefix(err, "NOSCRIPT") }

// IsTryAgain reports whether a server of a Cluster refused a call while the slot of its keys moves, because the server
// doesn't have all of the keys. Then nothing ran. The error is the same if one of the keys does not exist on any
// server.
func IsTryAgain(err error) bool { return err != nil && redis.HasErrorPrefix(err, "TRYAGAIN") }

// write writes the words of the call into t.words.
func (t *TakesCall) write() error {
	if len(t.takes) < 1 || len(t.takes) > MaxTakes {
		return fmt.Errorf("%w: takes of %d buckets in a call; want 1 to %d", ErrInvalidAmount, len(t.takes), MaxTakes)
	}
	for i := range t.takes {
		if t.takes[i].Whole != t.takes[0].Whole {
			return fmt.Errorf("%w: a call of which some buckets are Whole and others are not", ErrInvalidAmount)
		}
	}
	t.words = append(t.words[:0], nil, nil, 0)
	t.templates = t.templates[:0]
	if t.takes[0].Whole {
		return t.writeWhole()
	}
	return t.writeTokens()
}

// writeTokens adds the keys and arguments of a call that reads tokens only.
func (t *TakesCall) writeTokens() error {
	for i := range t.takes {
		t.words = append(t.words, &t.takes[i].Key)
	}
	t.words[firstKey-1] = len(t.takes)
	for i := range t.takes {
		total, err := t.takes[i].total()
		if err != nil {
			return err
		}
		t.words = append(t.words, total)
	}
	leave, below := int64(0), int64(-1)
	for i := range t.takes {
		b := &t.takes[i]
		l, m := b.leave(), int64(-1)
		if b.Below > 0 {
			m = b.Below
		}
		if l != leave || m != below {
			leave, below = l, m
			t.words = append(t.words, i+1, leave, below)
		}
	}
	return nil
}

// writeWhole adds the keys and arguments of a call that reads all of the buckets.
func (t *TakesCall) writeWhole() error {
	for i := range t.takes {
		t.writeKeys(&t.takes[i])
	}
	t.words[firstKey-1] = len(t.words) - firstKey
	t.words = append(t.words, len(t.templates))
	for _, template := range t.templates {
		t.words = append(t.words, template.terms, template.maxKeys, flag(!template.crossSlot), template.schedule())
	}
	for i := range t.takes {
		b := &t.takes[i]
		if _, err := b.total(); err != nil {
			return err
		}
		t.writeRuns(b)
	}
	return nil
}

// writeKeys adds the keys of a bucket to the words. It adds the bucket's template to the templates, if it isn't there
// yet.
func (t *TakesCall) writeKeys(b *Takes) {
	keys := bucketKeys(b.Key)
	t.words = append(t.words, keys[0], keys[2])
	template := b.Template
	if template == nil {
		return
	}
	t.words = append(t.words, keys[1])
	if !b.Existing {
		t.words = append(t.words, OverrideKey(b.Key))
	}
	if !template.crossSlot && template.steps == nil {
		t.words = append(t.words, &template.sets[ActiveShard(b.Key)])
	}
	if !template.crossSlot {
		t.words = append(t.words, &template.alive)
	}
	if !slices.Contains(t.templates, template) {
		t.templates = append(t.templates, template)
	}
}

// writeRuns adds the arguments of a bucket.
func (t *TakesCall) writeRuns(b *Takes) {
	template := 0
	if b.Template != nil {
		template = slices.Index(t.templates, b.Template) + 1
	}
	t.words = append(t.words, template)
	if b.Template != nil && b.Template.steps != nil {
		t.words = append(t.words, b.Schedule, flag(b.Swept))
	}
	t.words = append(t.words, flag(!b.Existing), flag(b.Terms), flag(b.InLine),
		int64(math.Ceil(b.Hold.Seconds())), len(b.Runs))
	t.words = appendRuns(t.words, b.Runs)
}

// appendRuns adds runs as the scripts read them.
func appendRuns(words []any, runs []policy.Run) []any {
	for _, r := range runs {
		n := r.N
		if r.UpTo {
			n = 0
		}
		words = append(words, n, r.Count)
		if r.Leave == (policy.Leave{}) {
			words = append(words, 0)
		} else {
			words = append(words, r.Leave.String())
		}
	}
	return words
}

func flag(on bool) int {
	if on {
		return 1
	}
	return 0
}

// total returns the number of tokens of all takes.
func (b *Takes) total() (total int64, err error) {
	total, err = totalOf(b.Runs)
	if err != nil {
		return 0, err
	}
	if b.Lazy != nil {
		return 0, fmt.Errorf("%w: takes of a lazy bucket among others", ErrInvalidAmount)
	}
	for i := range b.Runs {
		if l := b.Runs[i].Leave; l.Percent > 0 && !b.Whole {
			return 0, fmt.Errorf("%w: leave %s of an unknown capacity; ask the bucket whole", ErrInvalidAmount, l)
		}
	}
	if total == 0 && (!b.Whole || b.Template == nil) {
		return 0, fmt.Errorf("%w: no takes", ErrInvalidAmount)
	}
	return total, nil
}

// totalOf returns the number of tokens of all takes of the runs.
func totalOf(runs []policy.Run) (total int64, err error) {
	for i := range runs {
		r := &runs[i]
		if r.N < 1 || r.Count < 1 || r.N > (policy.MaxTokens-total)/r.Count || r.UpTo && r.N > 1 {
			return 0, fmt.Errorf("%w: %d takes of %d tokens; want at least 1 of each and %d together",
				ErrInvalidAmount, r.Count, r.N, int64(policy.MaxTokens))
		}
		if err := r.Leave.Validate(); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrInvalidAmount, err)
		}
		total += r.N * r.Count
	}
	return total, nil
}

// leave returns the largest number of tokens that one of the takes must leave.
func (b *Takes) leave() (most int64) {
	for i := range b.Runs {
		most = max(most, b.Runs[i].Leave.Tokens)
	}
	return most
}

// read reads the values of the reply to the call.
func (t *TakesCall) read(values []int64) ([]TakesReply, error) {
	r := &integerReply{values: values}
	t.replies = t.replies[:0]
	now := int64(0)
	if t.takes[0].Whole {
		now = r.next()
	}
	for i := range t.takes {
		b := &t.takes[i]
		if b.Whole {
			t.replies = append(t.replies, readTakes(r, now, b))
			continue
		}
		left := r.next()
		t.replies = append(t.replies, TakesReply{Missed: left < 0, OK: left >= 0, Remaining: max(0, left)})
	}
	if !r.good() {
		return nil, fmt.Errorf("%w: %d integers that are none for takes of %d buckets", ErrBadReply, len(values),
			len(t.takes))
	}
	return t.replies, nil
}

// readTakes reads the reply for one bucket of a Whole call.
func readTakes(r *integerReply, now int64, b *Takes) TakesReply {
	switch code := r.next(); code {
	case codeDone:
	case codeUnknown:
		return TakesReply{Err: fmt.Errorf("%w %q", ErrUnknownBucket, b.Key)}
	case codeMalformed:
		return TakesReply{Err: malformed(bucketKeys(b.Key), r.next())}
	case codeTooMany:
		return TakesReply{Err: b.Template.TooMany(b.Key, r.next())}
	case codeEnded:
		return TakesReply{Ended: true}
	case codeSchedule:
		since := r.next()
		if b.Template == nil || b.Template.steps == nil {
			r.bad = true
			return TakesReply{}
		}
		return TakesReply{Schedule: b.Template.again(now, since)}
	default:
		r.bad = true
		return TakesReply{}
	}
	reply := TakesReply{OK: true, Remaining: r.next()}
	reply.Refilled = Refilled{Version: policy.Version{Era: r.next(), Index: r.next()}, Last: r.next(), Now: now}
	reply.Till = r.next()
	reply.Terms = readTerms(r)
	reply.readRuns(r, b.Runs)
	return reply
}

// readTerms reads the count of a policy's numbers, and then the numbers. It returns nil if the count is 0.
func readTerms(r *integerReply) *policy.Terms {
	n := r.next()
	if n == 0 {
		return nil
	}
	terms, err := policy.TermsOf(r.take(n))
	r.bad = r.bad || err != nil
	return &terms
}

// readRuns reads the results of runs.
func (t *TakesReply) readRuns(r *integerReply, runs []policy.Run) {
	for i, run := range runs {
		taken, wait := r.next(), r.next()
		r.bad = r.bad || taken < 0 || taken > run.Count
		if taken < run.Count && t.OK {
			t.OK = false
			t.Runs = make([]RunReply, len(runs))
			for k := range i {
				t.Runs[k].Taken = runs[k].Count
			}
		}
		if !t.OK {
			t.Runs[i] = RunReply{Taken: taken, Wait: micros(wait)}
		}
	}
}
