package lua

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// FlowTakes are the takes that a call makes from one divided bucket, for its flows. They are made one after the other,
// and each is all or nothing.
type FlowTakes struct {
	Key    string
	Runs   []policy.FlowRun // at least one
	InLine bool             // once a take of a flow doesn't fit, no later take of that flow is made
	Terms  bool             // return the policy even if all takes are made
	// Below makes the reply Missed if the bucket holds as many tokens or more; 0 for no bound. It is for a refilled
	// template's bucket, as in Takes.
	Below int64
}

// FlowTakesCall makes calls that take for flows from several buckets. It keeps what a call needs for the next one, so
// it serves one goroutine at a time. The zero FlowTakesCall is ready.
type FlowTakesCall struct {
	words   []any
	takes   []FlowTakes
	fields  []string
	replies []TakesReply
	cmd     onceIntegers
}

// MaxFlowRuns is the most runs for one bucket in a call. The script passes the fields of all of them to one command,
// and a script can pass only a limited number of arguments.
const MaxFlowRuns = 1000

// Do makes the takes of up to MaxTakes buckets with different keys in one call. On a Cluster all keys are in one slot.
// The replies are in the order of takes and valid until the next call. A bucket that isn't divided at present serves
// its takes one by one, in order.
//
// The replies are those of a Whole TakesCall. If all takes of a bucket were made and Terms is false, its reply has only
// the remaining tokens and the paid ones. The error for a bucket that doesn't exist is ErrUnknownBucket, even if it is
// a template's. A TakesCall creates such a bucket.
func (t *FlowTakesCall) Do(ctx context.Context, c Client, takes []FlowTakes) ([]TakesReply, error) {
	command := func(source bool) (redis.Cmder, error) { return t.Command(ctx, takes, source) }
	return doTakes(ctx, c, command, t.Read)
}

// Command returns the command of a call that Do would make, as TakesCall.Command does.
func (t *FlowTakesCall) Command(ctx context.Context, takes []FlowTakes, source bool) (redis.Cmder, error) {
	t.takes = takes
	if err := t.write(); err != nil {
		return nil, err
	}
	t.words[0], t.words[1] = flowsScript.by(source)
	t.cmd = integersCommand(ctx, t.words)
	return t.cmd, nil
}

// Read decodes the reply to the command. err is the error with which the command ended.
func (t *FlowTakesCall) Read(err error) ([]TakesReply, error) {
	if err != nil {
		return nil, fmt.Errorf("refiller: flows: %w", err)
	}
	r := &integerReply{values: t.cmd.Val()}
	t.replies = t.replies[:0]
	for i := range t.takes {
		t.replies = append(t.replies, readFlowTakes(r, &t.takes[i]))
	}
	if !r.good() {
		return nil, fmt.Errorf("%w: %d integers that are none for flows of %d buckets", ErrBadReply, len(r.values),
			len(t.takes))
	}
	return t.replies, nil
}

// write makes the words of the call.
func (t *FlowTakesCall) write() error {
	if len(t.takes) < 1 || len(t.takes) > MaxTakes {
		return fmt.Errorf("%w: takes of %d buckets in a call; want 1 to %d", ErrInvalidAmount, len(t.takes), MaxTakes)
	}
	t.words = append(t.words[:0], nil, nil, 4*len(t.takes))
	for i := range t.takes {
		key := t.takes[i].Key
		t.words = append(t.words, &t.takes[i].Key, ControlKey(key), FlowsKey(key), UseKey(key))
	}
	for i := range t.takes {
		if err := t.writeBucket(&t.takes[i]); err != nil {
			return err
		}
	}
	return nil
}

// writeBucket adds the arguments of a bucket.
func (t *FlowTakesCall) writeBucket(b *FlowTakes) error {
	if err := b.check(); err != nil {
		return err
	}
	below := int64(-1)
	if b.Below > 0 {
		below = b.Below
	}
	t.words = append(t.words, flag(b.Terms), flag(b.InLine), below)
	fields := newFlowFields(t.fields)
	for i := range b.Runs {
		fields.addTeams(b.Runs[i].Flow)
	}
	for i := range b.Runs {
		fields.add(b.Runs[i].Flow)
	}
	t.fields = fields.names
	t.words = fields.append(t.words)
	t.words = append(t.words, len(b.Runs))
	for i := range b.Runs {
		run := &b.Runs[i]
		flow, narrow, wide := fields.placesOf(run.Flow)
		t.words = append(t.words, flow, narrow, wide)
		t.words = appendRuns(t.words, []policy.Run{run.Run})
	}
	return nil
}

// check refuses runs that can't be made.
func (b *FlowTakes) check() error {
	if len(b.Runs) < 1 || len(b.Runs) > MaxFlowRuns {
		return fmt.Errorf("%w: %d runs of flows of a bucket; want 1 to %d", ErrInvalidAmount, len(b.Runs), MaxFlowRuns)
	}
	sum := int64(0)
	for i := range b.Runs {
		run := &b.Runs[i]
		if err := policy.CheckFlow(run.Flow); err != nil {
			return err
		}
		total, err := totalOf([]policy.Run{run.Run})
		if err != nil {
			return err
		}
		sum += total
		if sum > policy.MaxTokens {
			return fmt.Errorf("%w: takes of more than %d tokens together", ErrInvalidAmount, int64(policy.MaxTokens))
		}
	}
	return nil
}

// flowFields are the fields of a plan that a call reads: RootTeam, then teams, then flows.
type flowFields struct {
	names []string
	at    map[string]int // from 1
}

func newFlowFields(room []string) *flowFields {
	f := &flowFields{names: room[:0], at: make(map[string]int)}
	f.add(policy.RootTeam)
	return f
}

func (f *flowFields) add(name string) {
	if f.at[name] == 0 {
		f.names = append(f.names, name)
		f.at[name] = len(f.names)
	}
}

func (f *flowFields) addTeams(flow string) {
	for _, team := range policy.TeamsOf(flow) {
		f.add(team)
	}
}

// placesOf returns three places among the fields: the place of a flow, of its team, and of the team above that. If a
// team doesn't exist, its place is 1, which is RootTeam's.
func (f *flowFields) placesOf(flow string) (at, narrow, wide int) {
	teams := policy.TeamsOf(flow)
	slices.Reverse(teams)
	narrow, wide = f.at[teams[0]], 1
	if len(teams) > 1 {
		wide = f.at[teams[1]]
	}
	return f.at[flow], narrow, wide
}

// append adds the fields to the words of a call.
func (f *flowFields) append(words []any) []any {
	words = append(words, len(f.names))
	for _, name := range f.names {
		words = append(words, name)
	}
	return words
}

// Further codes of a bucket in the script's reply: see flows.lua.
const (
	codeAllMade  = 0
	codeSomePaid = 4
	codeMissed   = 5
	codeAllPaid  = 6
)

// readFlowTakes decodes the reply for a bucket.
func readFlowTakes(r *integerReply, b *FlowTakes) TakesReply {
	switch code := r.next(); code {
	case codeAllMade, codeAllPaid:
		return TakesReply{OK: true, Remaining: r.next(), Paid: code == codeAllPaid}
	case codeSomePaid:
		reply := TakesReply{OK: true, Remaining: r.next(), Runs: make([]RunReply, len(b.Runs))}
		for i := range b.Runs {
			reply.Runs[i] = RunReply{Taken: b.Runs[i].Count, Paid: r.next()}
		}
		return reply
	case codeMissed:
		return TakesReply{Missed: true}
	case codeDone:
	case codeUnknown:
		return TakesReply{Err: fmt.Errorf("%w %q", ErrUnknownBucket, b.Key)}
	case codeMalformed:
		return TakesReply{Err: malformed(append(bucketKeys(b.Key), FlowsKey(b.Key), UseKey(b.Key)), r.next())}
	default:
		r.bad = true
		return TakesReply{}
	}
	now := r.next()
	reply := TakesReply{OK: true, Remaining: r.next()}
	reply.Refilled = Refilled{Version: policy.Version{Era: r.next(), Index: r.next()}, Last: r.next(), Now: now}
	reply.Terms = readTerms(r)
	reply.Runs = make([]RunReply, len(b.Runs))
	for i := range b.Runs {
		run := RunReply{Taken: r.next(), Wait: micros(r.next()), Paid: r.next()}
		r.bad = r.bad || run.Taken < 0 || run.Taken > b.Runs[i].Count
		reply.OK = reply.OK && run.Taken == b.Runs[i].Count
		reply.Runs[i] = run
	}
	return reply
}
