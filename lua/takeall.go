package lua

import (
	"context"
	"fmt"

	"github.com/tokenrefill/refiller/policy"
)

// MaxAll is the most buckets of one TakeAll.
const MaxAll = 64

// Demand is a number of tokens of a bucket.
type Demand struct {
	Key string
	N   int64
}

// TakeAll takes tokens of several buckets, all or nothing, in one call. There are
// 1 to MaxAll demands, each of another bucket, and on a Cluster all in one slot.
//
// The replies are in the order of the demands. If ok, each is a take, with the era
// in Version; otherwise nothing was taken, and OK tells of each bucket whether its
// tokens are there. A bucket without a policy is ErrUnknownBucket, since nothing
// could be returned to it.
func TakeAll(ctx context.Context, c Client, demands []Demand) (ok bool, replies []TakeReply, err error) {
	if len(demands) < 1 || len(demands) > MaxAll {
		return false, nil, fmt.Errorf("%w: %d buckets; want 1 to %d", ErrInvalidAmount, len(demands), MaxAll)
	}
	keys := make([]string, 0, 3*len(demands))
	args := make([]any, 0, len(demands))
	for _, d := range demands {
		if err := checkAmount(d.N); err != nil {
			return false, nil, err
		}
		keys = append(keys, bucketKeys(d.Key)...)
		args = append(args, d.N)
	}
	v, err := allScript.run(ctx, c, keys, args...)
	if err != nil {
		return false, nil, err
	}
	return decodeAll(v, demands)
}

func decodeAll(v any, demands []Demand) (ok bool, replies []TakeReply, err error) {
	r, code, err := open(v, "", codeDone, codeDenied, codeUnknown, codeMalformed)
	if err != nil {
		return false, nil, err
	}
	if code == codeUnknown || code == codeMalformed {
		at := r.int() - 1
		of := at
		if code == codeMalformed {
			of = at / 3
		}
		if err := r.end(); err != nil {
			return false, nil, err
		}
		if at < 0 || of >= int64(len(demands)) {
			return false, nil, fmt.Errorf("%w: bucket or key number %d", ErrBadReply, at+1)
		}
		if code == codeMalformed {
			return false, nil, malformed(demands[of].Key, at%3+1)
		}
		return false, nil, fmt.Errorf("%w %q, or it has no policy", ErrUnknownBucket, demands[of].Key)
	}
	replies = make([]TakeReply, len(demands))
	for i, d := range demands {
		if code == codeDone {
			replies[i] = TakeReply{OK: true, Taken: d.N, Remaining: r.int(), Refilled: Refilled{Version: policy.Version{Era: r.int()}}, Terms: r.terms()}
			continue
		}
		fits := r.int()
		replies[i] = TakeReply{OK: fits == 1, Remaining: r.int(), Wait: micros(r.int()), Refilled: r.refilled(), Terms: r.terms()}
	}
	return code == codeDone, replies, r.end()
}
