package lua

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// OverridesKey is the key of the set of all keys that may have an override.
const OverridesKey = "{refiller:templates}:overrides"

// Override returns the policy that overrides the template's for a key. It returns nil if the key has no override, or
// one that can't be read. Then the template's policy is in force.
func Override(ctx context.Context, c Client, key string) (*policy.Terms, error) {
	cmd := OverrideCommand(ctx, key)
	if err := c.Process(ctx, cmd); err != nil { // cmd is not read: the client may still be writing to it
		return overrideOf("", err)
	}
	return ReadOverride(cmd)
}

// OverrideCommand returns the command of Override, which the caller sends by itself or in a pipeline.
func OverrideCommand(ctx context.Context, key string) *redis.StringCmd {
	return redis.NewStringCmd(ctx, "get", OverrideKey(key))
}

// ReadOverride reads the reply to OverrideCommand, as Override does.
func ReadOverride(cmd *redis.StringCmd) (*policy.Terms, error) {
	return overrideOf(cmd.Val(), cmd.Err())
}

func overrideOf(text string, err error) (*policy.Terms, error) {
	switch {
	case errors.Is(err, redis.Nil) || redis.HasErrorPrefix(err, "WRONGTYPE"):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("refiller: override: %w", err)
	}
	t, err := policy.DecodeTerms(text)
	if err != nil {
		return nil, nil //nolint:nilerr // the scripts ignore it, too
	}
	return &t, nil
}

// ErrNotOfTemplate is returned for a bucket that the configuration declares, or that is a pool's, although a template
// matches its key.
var ErrNotOfTemplate = errors.New("refiller: bucket is not of a template")

// Overrides is like Override for many keys, in one round trip.
func Overrides(ctx context.Context, rdb redis.UniversalClient, keys []string) ([]*policy.Terms, error) {
	cmds, errs := each(ctx, rdb, len(keys),
		func(p redis.Pipeliner, i int) *redis.StringCmd { return p.Get(ctx, OverrideKey(keys[i])) })
	overrides := make([]*policy.Terms, len(keys))
	for i, cmd := range cmds {
		var err error
		overrides[i], err = overrideOf(cmd.Val(), errs[i])
		if err != nil {
			return nil, err
		}
	}
	return overrides, nil
}

// OverrideReply is the reply to a change of a key's override.
type OverrideReply struct {
	Had    bool          // the key had an override before
	Terms  *policy.Terms // the override that the key has now; nil for none
	Exists bool          // the bucket exists; a lazy bucket that is full doesn't
	Tokens int64         // in the bucket, under its new policy

	Till int64 // when the bucket expires, in Unix seconds, for Template.Enter; 0 if it is lazy or missing
}

// SetOverride gives a key of a template a policy of its own, and switches the bucket to it. The script sets the fence's
// Seq to one more than that of the key's last override. template is the template's policy, and enforce is the way in
// which the template is enforced. SetOverride may be repeated. If the bucket isn't of a template, nothing changes and
// the error is ErrNotOfTemplate.
func SetOverride(ctx context.Context, c Client, key string, own, template policy.Terms,
	enforce policy.Enforce) (OverrideReply, error) {
	own.Template = true
	return changeOverride(ctx, c, key, own.Encode(), &template, enforce)
}

// UnsetOverride removes a key's override, and switches the bucket to the template's policy. template is nil if no
// template matches the key. UnsetOverride may be repeated.
func UnsetOverride(ctx context.Context, c Client, key string, template *policy.Terms,
	enforce policy.Enforce) (OverrideReply, error) {
	return changeOverride(ctx, c, key, "", template, enforce)
}

func changeOverride(ctx context.Context, c Client, key, own string, template *policy.Terms,
	enforce policy.Enforce) (OverrideReply, error) {
	terms, lazy := "", 0
	if template != nil {
		terms = template.Encode()
	}
	if enforce == policy.EnforceLazy {
		lazy = 1
	}
	r, code, err := overrideScript.ask(ctx, c, append(bucketKeys(key), OverrideKey(key), LazyKey(key)),
		[]any{own, terms, lazy}, codeDone, codeReused)
	switch {
	case err != nil:
		return OverrideReply{}, err
	case code == codeReused:
		return OverrideReply{}, fmt.Errorf("%w: %q", ErrNotOfTemplate, key)
	}
	reply := OverrideReply{Had: r.Int() == 1, Exists: r.Int() > 0, Tokens: r.Int(), Till: r.Int()}
	reply.Terms = r.terms()
	return reply, r.End()
}
