package lua

import (
	"cmp"
	"context"
	"crypto/sha1" //nolint:gosec // as below
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// MaxAll is the most buckets of one TakeAll.
const MaxAll = 64

// Demand is a number of tokens to take from a bucket, with the number to leave in it.
type Demand struct {
	Key   string
	N     int64
	Leave policy.Leave
	Flow  Flow // for which flow of the bucket
}

// TakeAll takes tokens from several buckets, all or nothing, in one call. There are 1 to MaxAll demands, each of
// another bucket, and on a Cluster all in one slot.
//
// The replies are in the order of the demands. The OK of a reply reports whether the bucket has the tokens. If the
// result ok is true, they were taken from each bucket that has them; the other buckets are in shadow mode. If ok is
// false, nothing was taken. The error for a bucket without a policy is ErrUnknownBucket, because nothing could be
// returned to such a bucket.
func TakeAll(ctx context.Context, c Client, demands []Demand) (ok bool, replies []TakeReply, err error) {
	return takeAll(ctx, c, "", 0, demands)
}

// TakeAllOnce is like TakeAll, under a request id: see TakeOnce. The order of the demands doesn't matter. The request
// is remembered with the bucket whose key sorts first. If the same id is used for other demands and that bucket is the
// same, the error is ErrRequestReused.
func TakeAllOnce(ctx context.Context, c Client, id string, memory time.Duration, demands []Demand) (ok bool,
	replies []TakeReply, err error) {
	if err := checkRequest(id, memory); err != nil {
		return false, nil, err
	}
	sorted := slices.SortedFunc(slices.Values(demands), func(a, b Demand) int { return cmp.Compare(a.Key, b.Key) })
	ok, replies, err = takeAll(ctx, c, id, memory, sorted)
	if err != nil {
		return false, nil, err
	}
	return ok, inOrder(demands, sorted, replies), nil
}

// inOrder returns the replies to the sorted demands in the order of the demands.
func inOrder(demands, sorted []Demand, replies []TakeReply) []TakeReply {
	of := make(map[string]TakeReply, len(replies))
	for i, d := range sorted {
		of[d.Key] = replies[i]
	}
	ordered := make([]TakeReply, len(demands))
	for i, d := range demands {
		ordered[i] = of[d.Key]
	}
	return ordered
}

func takeAll(ctx context.Context, c Client, id string, memory time.Duration, demands []Demand) (ok bool,
	replies []TakeReply, err error) {
	if len(demands) < 1 || len(demands) > MaxAll {
		return false, nil, fmt.Errorf("%w: %d buckets; want 1 to %d", ErrInvalidAmount, len(demands), MaxAll)
	}
	keys, args := make([]string, 0, 4*len(demands)+1), make([]any, 3, 3+4*len(demands))
	args[0] = len(demands)
	args[1] = ""
	args[2] = ""
	for _, d := range demands {
		if err := checkTake(d.N, d.Leave); err != nil {
			return false, nil, err
		}
		if err := policy.CheckFlow(d.Flow.Name); err != nil {
			return false, nil, err
		}
		keys = d.Flow.appendKeys(append(keys, TokensKey(d.Key), ControlKey(d.Key)), d.Key)
		args = append(args, d.N, d.Leave.String(), flag(d.Flow.Divided), d.Flow.Name)
	}
	if id != "" {
		keys = append(keys, RequestKey(demands[0].Key, id))
		args[1], args[2] = nameOf(demands), memory.Milliseconds()
	}
	r, code, err := takeAllScript.ask(ctx, c, keys, args, codeDone, codeDenied, codeUnknown, codeReused)
	if inOrder, changed := undivided(demands); changed && IsTryAgain(err) {
		return takeAll(ctx, c, id, memory, inOrder)
	}
	if err != nil {
		return false, nil, err
	}
	return decodeAll(r, code, id, demands)
}

// undivided returns the demands with Divided set to false, and reports whether it was true for any of them.
func undivided(demands []Demand) (inOrder []Demand, changed bool) {
	inOrder = slices.Clone(demands)
	for i := range inOrder {
		changed = changed || inOrder[i].Flow.Divided
		inOrder[i].Flow.Divided = false
	}
	return inOrder, changed
}

// nameOf returns a name that identifies the demands of a request.
func nameOf(demands []Demand) string {
	sum := sha1.New() //nolint:gosec // It identifies the requests of a caller.
	for _, d := range demands {
		fmt.Fprintf(sum, "%d:%s %d %s %d:%s\n", len(d.Key), d.Key, d.N, d.Leave, len(d.Flow.Name), d.Flow.Name)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func decodeAll(r *Reply, code int64, id string, demands []Demand) (ok bool, replies []TakeReply, err error) {
	switch code {
	case codeUnknown:
		b := r.Int()
		if b < 1 || b > int64(len(demands)) {
			return false, nil, r.fail(fmt.Errorf("%w: bucket number %d", ErrBadReply, b))
		}
		return false, nil, r.fail(fmt.Errorf("%w %q, or it has no policy", ErrUnknownBucket, demands[b-1].Key))
	case codeReused:
		return false, nil, r.fail(fmt.Errorf("%w: %q of bucket %q asked for something else", ErrRequestReused, id,
			demands[0].Key))
	}
	replies = make([]TakeReply, len(demands))
	for i, d := range demands {
		fits := r.Int()
		replies[i] = TakeReply{OK: fits == 1, Remaining: r.Int(), Wait: micros(r.Int()), Refilled: r.refilled(),
			Terms: r.terms()}
		paid := r.Int()
		if code == codeDone {
			replies[i].Paid = paid
			replies[i].Repeated = replies[i].Now == 0
			if replies[i].OK {
				replies[i].Taken = d.N
			}
		}
	}
	return code == codeDone, replies, r.End()
}
