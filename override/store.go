package override

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Errors of the methods, to be matched with errors.Is.
var (
	// ErrNoTemplate is returned for a key that no published template matches.
	ErrNoTemplate = errors.New("override: no published template matches")
	// ErrOverride is returned for an override that its template can't have. It wraps the *policy.FieldError that gives the
	// reason.
	ErrOverride = errors.New("override: bad override")
)

// Limit is the limit that is in force for one key.
type Limit struct {
	Key      string
	Template string // the prefix of the template that matches the key
	Enforce  policy.Enforce
	Own      bool // it has an override
	Bucket   bool // a configured bucket, or a pool's, is in force instead, until its keys are deleted
	Capacity int64
	Rate     policy.Rate // in the units of policy.Rate.InUnits; zero of a budget
	// Steps and StepTokens are for a budget: when tokens fall due, and how many at each step.
	Steps      policy.Steps
	StepTokens int64

	Changed bool // of a Set or Unset: the key had an override before

	// Exists and Tokens are set by Set and Unset, and if Bucket is true.
	Exists bool  // there is a bucket that isn't both lazy and full
	Tokens int64 // in the bucket, after the switch
}

// Store reads and changes overrides.
type Store struct{ rdb redis.UniversalClient }

// New makes a Store that uses a go-redis client. The Store never closes the client.
func New(rdb redis.UniversalClient) *Store { return &Store{rdb} }

// template returns the published template of a key.
func (s *Store) template(ctx context.Context, key string) (*policy.CompiledTemplate, error) {
	if err := lua.CheckKey(key); err != nil {
		return nil, err
	}
	set, _, err := lua.ReadTemplates(ctx, s.rdb, "")
	if err != nil {
		return nil, err
	}
	return set.Of(key), nil
}

func noTemplate(key string) error { return fmt.Errorf("%w %q", ErrNoTemplate, key) }

// Set gives a key of a template an override, and replaces the one that it has. After an error that isn't one of this
// package, the override may be in force or not. Then call Set again.
func (s *Store) Set(ctx context.Context, key string, o policy.Override) (Limit, error) {
	t, err := s.template(ctx, key)
	if err != nil {
		return Limit{}, err
	}
	if t == nil {
		return Limit{}, noTemplate(key)
	}
	if o == (policy.Override{}) {
		return Limit{}, fmt.Errorf("%w: it says nothing: want a capacity or a rate", ErrOverride)
	}
	if t.Terms.Budget() && o.Rate != (policy.Rate{}) {
		return Limit{}, fmt.Errorf("%w for a key of the template %q: %w", ErrOverride, t.Prefix,
			&policy.FieldError{Field: "rate", Msg: "the template has a schedule: want a capacity alone"})
	}
	own, err := t.With(o)
	if err != nil {
		return Limit{}, fmt.Errorf("%w for a key of the template %q: %w", ErrOverride, t.Prefix, err)
	}
	// The key is added to the list first, because All leaves out a key that has no override. It is added again at the end,
	// because an Unset that was under way may have removed it.
	if err := s.enlist(ctx, key); err != nil {
		return Limit{}, err
	}
	reply, err := lua.SetOverride(ctx, s.rdb, key, own.Terms(policy.Fence{Epoch: policy.OwnEpoch}), t.Terms, t.Enforce)
	if err != nil {
		return Limit{}, err
	}
	if err := s.enlist(ctx, key); err != nil {
		return Limit{}, err
	}
	return s.changed(ctx, key, t, reply)
}

func (s *Store) enlist(ctx context.Context, key string) error {
	if err := s.rdb.SAdd(ctx, lua.OverridesKey, key).Err(); err != nil {
		return fmt.Errorf("override: %w", err)
	}
	return nil
}

// Unset removes a key's override, even if no template matches the key any more.
func (s *Store) Unset(ctx context.Context, key string) (Limit, error) {
	t, err := s.template(ctx, key)
	if err != nil {
		return Limit{}, err
	}
	var terms *policy.Terms
	enforce := policy.EnforceRefilled
	if t != nil {
		terms, enforce = &t.Terms, t.Enforce
	}
	reply, err := lua.UnsetOverride(ctx, s.rdb, key, terms, enforce)
	if err != nil {
		return Limit{}, err
	}
	if err := s.rdb.SRem(ctx, lua.OverridesKey, key).Err(); err != nil {
		return Limit{}, fmt.Errorf("override: %w", err)
	}
	own, err := lua.Override(ctx, s.rdb, key)
	if err != nil {
		return Limit{}, err
	}
	if own != nil { // one that was set meanwhile
		if err := s.enlist(ctx, key); err != nil {
			return Limit{}, err
		}
	}
	if t == nil {
		if !reply.Had {
			return Limit{}, noTemplate(key)
		}
		return Limit{Key: key, Changed: true, Exists: reply.Exists, Tokens: reply.Tokens}, nil
	}
	l, err := s.changed(ctx, key, t, reply)
	if err != nil {
		return l, err
	}
	return s.plain(ctx, l)
}

// changed returns the limit that is in force after a change. If the template's active set is in another slot than the
// bucket, changed also enters the bucket there, because the script could not.
func (s *Store) changed(ctx context.Context, key string, t *policy.CompiledTemplate, r lua.OverrideReply) (Limit,
	error) {
	l := limitOf(key, t, r.Terms)
	l.Changed = r.Had
	l.Exists = r.Exists
	l.Tokens = r.Tokens
	if r.Till == 0 {
		return l, nil
	}
	_, cluster := s.rdb.(*redis.ClusterClient)
	return l, lua.NewTemplate(t, cluster).Enter(ctx, s.rdb, key, r.Till)
}

// limitOf returns the limit of a key. own is the override of the key; nil for none.
func limitOf(key string, t *policy.CompiledTemplate, own *policy.Terms) Limit {
	l := Limit{Key: key, Own: own != nil}
	if t != nil {
		l.Template = t.Prefix
		l.Enforce = t.Enforce
		l.Capacity = t.Terms.Capacity
		l.Steps = t.Policy.Steps
		l.fallsDue(&t.Terms)
	}
	if own != nil {
		l.Capacity = own.Capacity
		l.fallsDue(own)
	}
	return l
}

// fallsDue sets the fields that describe how many tokens fall due under the terms.
func (l *Limit) fallsDue(t *policy.Terms) {
	if t.Kind == policy.Stepped {
		l.StepTokens = t.Tokens
		return
	}
	l.Rate = t.Rate().InUnits()
}

// Get returns the limit that is in force for a key of a template.
func (s *Store) Get(ctx context.Context, key string) (Limit, error) {
	t, err := s.template(ctx, key)
	if err != nil {
		return Limit{}, err
	}
	own, err := lua.Override(ctx, s.rdb, key)
	if err != nil {
		return Limit{}, err
	}
	if t == nil && own == nil {
		return Limit{}, noTemplate(key)
	}
	return s.plain(ctx, limitOf(key, t, own))
}

// plain corrects a limit if the key has a bucket that isn't of a template, because that bucket is in force. Takes from
// a lazy template's bucket don't read such a bucket, so plain ignores it then.
func (s *Store) plain(ctx context.Context, l Limit) (Limit, error) {
	if l.Enforce == policy.EnforceLazy {
		return l, nil
	}
	p, err := lua.Peek(ctx, s.rdb, l.Key, 1)
	if err != nil && !errors.Is(err, lua.ErrUnknownBucket) {
		return l, err
	}
	if p.Terms != nil && !p.Terms.Template {
		l.Bucket = true
		l.Capacity = p.Terms.Capacity
		l.Rate = p.Terms.Rate().InUnits()
		l.Exists, l.Tokens = true, p.Tokens
	}
	return l, nil
}

// listAtOnce is about the number of keys of the list that one command reads.
const listAtOnce = 500

// All returns the overrides, in no order. It ends with the first error. An override that is set meanwhile may be
// missing. The list is read in parts, so that it delays no other client.
func (s *Store) All(ctx context.Context) iter.Seq2[Limit, error] {
	return func(yield func(Limit, error) bool) {
		set, _, err := lua.ReadTemplates(ctx, s.rdb, "")
		if err != nil {
			yield(Limit{}, err)
			return
		}
		seen := map[string]bool{}
		for cursor := uint64(0); ; {
			keys, next, err := s.rdb.SScan(ctx, lua.OverridesKey, cursor, "", listAtOnce).Result()
			if err != nil {
				yield(Limit{}, fmt.Errorf("override: %w", err))
				return
			}
			var fresh []string
			for _, key := range keys {
				if !seen[key] {
					seen[key] = true
					fresh = append(fresh, key)
				}
			}
			owns, err := lua.Overrides(ctx, s.rdb, fresh)
			if err != nil {
				yield(Limit{}, err)
				return
			}
			for i, own := range owns {
				if own != nil && !yield(limitOf(fresh[i], set.Of(fresh[i]), own), nil) {
					return
				}
			}
			cursor = next
			if cursor == 0 {
				return
			}
		}
	}
}
