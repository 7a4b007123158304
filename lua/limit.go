package lua

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// LimitsKey is the key of the set of keys that may have policies of their own.
const LimitsKey = "{refiller:templates}:limits"

// Limit is the policy that a key of a template has alone; nil if it has none, or
// none that can be read: then it has the template's.
func Limit(ctx context.Context, c Client, key string) (*policy.Terms, error) {
	cmd := redis.NewStringCmd(ctx, "get", LimitKey(key))
	if err := c.Process(ctx, cmd); err != nil { // the command may be under way
		return limitOf("", err)
	}
	return limitOf(cmd.Val(), nil)
}

func limitOf(text string, err error) (*policy.Terms, error) {
	switch {
	case errors.Is(err, redis.Nil) || redis.HasErrorPrefix(err, "WRONGTYPE"):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("refiller: limit: %w", err)
	}
	t, err := policy.DecodeTerms(text)
	if err != nil {
		return nil, nil //nolint:nilerr // the scripts take it for none
	}
	return &t, nil
}

// Limits is Limit of many keys in one round trip.
func Limits(ctx context.Context, rdb redis.UniversalClient, keys []string) ([]*policy.Terms, error) {
	limits, cmds := make([]*policy.Terms, len(keys)), make([]*redis.StringCmd, len(keys))
	if len(keys) == 0 {
		return nil, nil
	}
	_, execErr := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			cmds[i] = p.Get(ctx, LimitKey(key))
		}
		return nil
	})
	for i, cmd := range cmds {
		if cmd.Err() == nil && cmd.Val() == "" && execErr != nil {
			return nil, fmt.Errorf("refiller: limit: %w", execErr) // the batch failed before this command was answered
		}
		var err error
		if limits[i], err = limitOf(cmd.Val(), cmd.Err()); err != nil {
			return nil, err
		}
	}
	return limits, nil
}

// LimitReply is the answer to a change of the policy that a key has alone.
type LimitReply struct {
	Had    bool          // it had one before
	Terms  *policy.Terms // the one that it has; nil for none
	Exists bool          // there is a bucket, which isn't both lazy and full
	Tokens int64         // that it holds under its new policy

	Till int64 // of a refilled template's: when it expires, in s, which is to be told to Template.Enter; 0 otherwise
}

// SetLimit gives a key of a template a policy of its own, under the fence that
// follows its last one, and switches the bucket to it. template is the template's
// policy, and enforce how it is enforced. It may be repeated.
func SetLimit(ctx context.Context, c Client, key string, own, template policy.Terms, enforce policy.Enforce) (LimitReply, error) {
	own.Template = true
	return changeLimit(ctx, c, key, own.Encode(), &template, enforce)
}

// UnsetLimit takes the policy that a key has alone away, and switches the bucket
// to the template's; template is nil if no template matches the key. It may be
// repeated.
func UnsetLimit(ctx context.Context, c Client, key string, template *policy.Terms, enforce policy.Enforce) (LimitReply, error) {
	return changeLimit(ctx, c, key, "", template, enforce)
}

func changeLimit(ctx context.Context, c Client, key, own string, template *policy.Terms, enforce policy.Enforce) (LimitReply, error) {
	terms, lazy := "", 0
	if template != nil {
		terms = template.Encode()
	}
	if enforce == policy.EnforceLazy {
		lazy = 1
	}
	v, err := limitScript.run(ctx, c, append(bucketKeys(key), LimitKey(key), LazyKey(key)), own, terms, lazy)
	if err != nil {
		return LimitReply{}, err
	}
	r, code, err := open(v, key, codeDone, codeMalformed)
	if err != nil {
		return LimitReply{}, err
	}
	if code == codeMalformed {
		k := r.int()
		if err := r.end(); err != nil {
			return LimitReply{}, err
		}
		for i, other := range []string{LimitKey(key), LazyKey(key)} {
			if k == int64(4+i) {
				return LimitReply{}, fmt.Errorf("%w %q: the key %q does not hold what it should", ErrMalformedBucket, key, other)
			}
		}
		return LimitReply{}, malformed(key, k)
	}
	reply := LimitReply{Had: r.int() == 1, Exists: r.int() > 0, Tokens: r.int(), Till: r.int()}
	reply.Terms = r.terms()
	return reply, r.end()
}
