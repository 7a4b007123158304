package lua_test

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// takeWhole makes the takes of one bucket in a Whole call.
func takeWhole(ctx context.Context, c lua.Client, b lua.Takes) (lua.TakesReply, error) {
	b.Whole = true
	replies, err := new(lua.TakesCall).Do(ctx, c, []lua.Takes{b})
	if err != nil {
		return lua.TakesReply{}, err
	}
	return replies[0], replies[0].Err
}

// takeOne takes n tokens, all or nothing.
func takeOne(ctx context.Context, c lua.Client, key string, n int64, withTerms bool) (lua.TakeReply, error) {
	r, err := takeWhole(ctx, c, lua.Takes{Key: key, Runs: one(n), Terms: withTerms})
	if err != nil {
		return lua.TakeReply{}, err
	}
	reply := lua.TakeReply{OK: r.OK, Remaining: r.Remaining, Terms: r.Terms}
	if r.OK {
		reply.Taken = n
	} else {
		reply.Wait, reply.Refilled = r.Runs[0].Wait, r.Refilled
	}
	return reply, nil
}

// takeUpTo takes as many tokens as there are, up to n.
func takeUpTo(ctx context.Context, c lua.Client, key string, n int64) (lua.TakeReply, error) {
	r, err := takeWhole(ctx, c, lua.Takes{Key: key, Runs: []policy.Run{{N: 1, Count: n, UpTo: true}}, Terms: true})
	if err != nil {
		return lua.TakeReply{}, err
	}
	reply := lua.TakeReply{OK: true, Taken: n, Remaining: r.Remaining, Terms: r.Terms}
	if !r.OK {
		reply.Taken, reply.OK = r.Runs[0].Taken, r.Runs[0].Taken > 0
	}
	if !reply.OK {
		reply.Wait, reply.Refilled = r.Runs[0].Wait, r.Refilled
	}
	return reply, nil
}

// takeTemplate makes takes of a template's bucket, or opens it.
func takeTemplate(ctx context.Context, c lua.Client, key string, t templateCall, runs []policy.Run,
	withTerms, inLine bool) (lua.TakesReply, error) {
	return takeWhole(ctx, c, lua.Takes{
		Key: key, Runs: runs, InLine: inLine, Template: lua.NewTemplate(ruled(t), t.CrossSlot), Existing: t.Terms == "",
		Hold: t.Hold, Terms: withTerms,
	})
}

// templateCall has what a take of a template's bucket needs of the template.
type templateCall struct {
	Prefix    string
	Terms     string // the template's, encoded; "" if the bucket is known to exist
	Capacity  int64  // of the bucket, as far as the caller knows
	MaxKeys   int64
	Hold      time.Duration // see lua.Takes
	CrossSlot bool          // see lua.NewTemplate
}

// ruled returns the template of a call.
func ruled(t templateCall) *policy.CompiledTemplate {
	return &policy.CompiledTemplate{Template: policy.Template{Prefix: t.Prefix, MaxKeys: t.MaxKeys}, Text: t.Terms}
}

// onCommand is a hook of a client. It runs for each command outside of a pipeline, and sends it by calling next.
type onCommand func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

func (onCommand) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h onCommand) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(ctx, cmd, next) }
}

func (onCommand) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
