package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// rehearsed, twoKeys and templated are the buckets of a rehearsal. twoKeys is for clients that know only two keys, and
// templated is the bucket of a template. request is the id of a take.
const (
	rehearsed = "refiller:doctor"
	twoKeys   = "refiller:doctor:two-keys"
	templated = "refiller:doctor:template"
	request   = "rehearsal"
)

// soon bounds waits that usually last a millisecond.
const soon = time.Second

// step is an operation of a refiller or consumer, with a name for people.
type step struct {
	name string
	do   func() error
}

// Rehearse runs the commands of a role on separate buckets. A missing right makes one of the commands fail.
func Rehearse(ctx context.Context, rdb redis.UniversalClient, role Role) error {
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1000), Interval: time.Millisecond, Strict: true}
	terms := p.Terms(policy.Fence{})
	steps := slices.Concat(refillSteps(ctx, rdb, terms), takeSteps(ctx, rdb), otherSteps(ctx, rdb, terms))
	if role == Refiller {
		steps = append(steps, refillerSteps(ctx, rdb)...)
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// refillSteps make a bucket and refill it.
func refillSteps(ctx context.Context, rdb redis.UniversalClient, terms policy.Terms) []step {
	var version policy.Version
	return []step{
		{"delete the test buckets", func() error { return clearRehearsal(ctx, rdb) }},
		{"load the scripts", func() error { return lua.Load(ctx, rdb) }},
		{"run a script by its text", func() error { // as a client does when Redis has lost the script
			return rdb.Eval(ctx, "return redis.call('PING')", []string{rehearsed}).Err()
		}},
		{"create a bucket", func() error {
			o, err := lua.Refill(ctx, rdb, rehearsed, policy.Call{Create: policy.CreateInitial, Terms: &terms})
			version = o.Version
			return err
		}},
		{"take", func() error {
			_, err := lua.Take(ctx, rdb, rehearsed, 500, true)
			return err
		}},
		{"take more tokens than there are", func() error {
			_, err := lua.Take(ctx, rdb, rehearsed, 1000, true)
			return err
		}},
		{"return", func() error {
			_, err := lua.Return(ctx, rdb, rehearsed, 1, 0)
			return err
		}},
		{"peek", func() error {
			_, err := lua.Peek(ctx, rdb, rehearsed, 1)
			return err
		}},
		{"refill", func() error {
			return until(ctx, func() (bool, error) {
				o, err := lua.Refill(ctx, rdb, rehearsed, policy.Call{Version: version, Terms: &terms})
				version = o.Version
				return o.Added > 0, err
			})
		}},
	}
}

// takeSteps take tokens from the bucket of refillSteps, and hold some of them.
func takeSteps(ctx context.Context, rdb redis.UniversalClient) []step {
	return []step{
		{"take with an id", func() error {
			_, err := lua.TakeOnce(ctx, rdb, rehearsed, request, policy.Run{N: 1, Count: 1}, time.Second)
			return err
		}},
		{"take from several buckets", func() error {
			_, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: rehearsed, N: 1}})
			return err
		}},
		{"reserve", func() error {
			_, err := lua.Reserve(ctx, rdb, rehearsed, lua.ReserveCall{ID: request, N: 1, TTL: policy.MinHold})
			return err
		}},
		{"end a reservation", func() error {
			return until(ctx, func() (bool, error) {
				s := lua.Sweep(ctx, rdb, []string{rehearsed}, 1)[0]
				return s.Returned+s.Clamped+s.Void > 0, s.Err
			})
		}},
		{"lease", func() error {
			_, err := lua.Lease(ctx, rdb, rehearsed, lua.LeaseCall{ID: "block", Seq: 1, Want: 10, TTL: time.Second})
			if err == nil {
				_, err = lua.Lease(ctx, rdb, rehearsed, lua.LeaseCall{ID: "block", Seq: 2, Back: 10, TTL: time.Second})
			}
			return err
		}},
	}
}

// otherSteps are the operations of templates, pools, operators and clients that know only two keys.
func otherSteps(ctx context.Context, rdb redis.UniversalClient, terms policy.Terms) []step {
	ofTemplate := terms
	ofTemplate.Template = true
	return []step{
		{"count consumers", func() error {
			_, err := lua.Heartbeat(ctx, rdb, rehearsed, "doctor", time.Second)
			return err
		}},
		{"take of a lazy bucket", func() error {
			runs := []policy.Run{{N: 1, Count: 1}}
			_, err := lua.LazyTake(ctx, rdb, rehearsed, &terms, runs, false)
			if err == nil {
				_, err = lua.LazyTake(ctx, rdb, rehearsed, &terms, runs, false)
			}
			return err
		}},
		{"take of a template's bucket", func() error {
			template := lua.NewTemplate(&policy.CompiledTemplate{
				Template: policy.Template{Prefix: templated, MaxKeys: 1}, Text: ofTemplate.Encode(),
			}, true)
			takes := []lua.Takes{{Key: templated, Runs: []policy.Run{{N: 1, Count: 1}}, Whole: true, Template: template}}
			replies, err := new(lua.TakesCall).Do(ctx, rdb, takes)
			if err == nil {
				err = template.Enter(ctx, rdb, templated, replies[0].Till)
			}
			if err == nil {
				err = template.Claim(ctx, rdb, templated)
			}
			return err
		}},
		{"remove a bucket from an active set", func() error {
			set := lua.ActiveKey(templated, lua.ActiveShard(templated))
			return errors.Join(rdb.SRem(ctx, set, templated).Err(), rdb.Exists(ctx, set).Err())
		}},
		{"read the tickets", func() error { return lua.Tickets(ctx, rdb, []string{rehearsed})[0].Err }},
		{"grant", func() error {
			_, err := lua.Grant(ctx, rdb, rehearsed, 1)
			return err
		}},
		{"reset", func() error {
			_, err := lua.Reset(ctx, rdb, rehearsed, 10)
			return err
		}},
		{"refill as a client that knows two keys", func() error {
			_, err := lua.Add(ctx, rdb, twoKeys, 1, 10, 0)
			if err == nil {
				_, err = lua.Add(ctx, rdb, twoKeys, 1, 10, 0) // the index is already used, so the script takes its call back
			}
			return err
		}},
		{"count the flows of a divided bucket", func() error { return rdb.HLen(ctx, lua.UseKey(rehearsed)).Err() }},
		{"update statistics", func() error { // without these rights, statistics are incomplete
			return errors.Join(rdb.HIncrBy(ctx, lua.ControlKey(twoKeys), "n", 1).Err(), rdb.PExpireTime(ctx, rehearsed).Err(),
				rdb.Persist(ctx, rehearsed).Err())
		}},
	}
}

// refillerSteps are operations of refillers that need no consumer.
func refillerSteps(ctx context.Context, rdb redis.UniversalClient) []step {
	return []step{
		{"read an active set", func() error {
			set := lua.ActiveKey(templated, lua.ActiveShard(templated))
			return errors.Join(rdb.SCard(ctx, set).Err(), rdb.SScan(ctx, set, 0, "", 1).Err())
		}},
	}
}

// until repeats done until it returns true or an error. It gives up after the time soon.
func until(ctx context.Context, done func() (bool, error)) error {
	for began := time.Now(); time.Since(began) < soon; {
		if is, err := done(); is || err != nil {
			return err
		}
		if !timing.Sleep(ctx.Done(), time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("nothing happened within %s", soon)
}

// clearRehearsal removes the keys that a rehearsal leaves.
func clearRehearsal(ctx context.Context, rdb redis.UniversalClient) error {
	const k = rehearsed
	return errors.Join(
		rdb.Del(ctx, lua.TokensKey(k), lua.IndexKey(k), lua.ControlKey(k), lua.OutstandingKey(k), lua.DueKey(k),
			lua.LiveKey(k), lua.LazyKey(k), lua.RequestKey(k, request)).Err(),
		rdb.Del(ctx, lua.TokensKey(twoKeys), lua.IndexKey(twoKeys), lua.ControlKey(twoKeys)).Err(),
		rdb.Del(ctx, lua.TokensKey(templated), lua.IndexKey(templated), lua.ControlKey(templated)).Err(),
		rdb.Del(ctx, lua.ActiveKey(templated, lua.ActiveShard(templated))).Err(),
		rdb.Del(ctx, lua.AliveKey(templated)).Err(),
	)
}
