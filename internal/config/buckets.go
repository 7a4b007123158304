package config

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/policy"
)

// buckets returns the file's buckets with their policies.
func (f *file) buckets(d *fields.Decoder) []Bucket {
	list := make([]Bucket, 0, len(f.Buckets))
	first := make(map[string]int, len(f.Buckets))
	for i := range f.Buckets {
		b, here := &f.Buckets[i], root.Field("buckets").Item(i)
		if other, twice := first[b.Key]; twice && b.Key != "" {
			d.Bad(here.Field("key"), "%s is already the key of the bucket %s: want another key",
				fields.Quote(b.Key), d.Where(root.Field("buckets").Item(other).Field("key")))
			continue
		}
		first[b.Key] = i
		list = append(list, Bucket{Key: b.Key, Policy: b.policy(d, here, f.RefillInterval)})
	}
	return list
}

// policy returns the policy of a bucket.
func (b *bucket) policy(d *fields.Decoder, here fields.Path, interval time.Duration) policy.Policy {
	p := b.limits.policy(interval)
	b.apply(d, here, b.limits, &p)
	p.OnLoss = b.OnLoss
	if d.Valid(here) {
		validate(d, here, p)
	}
	return p
}

// apply sets the rate or the schedule of a policy.
func (s *steps) apply(d *fields.Decoder, here fields.Path, l limits, p *policy.Policy) {
	p.Rate, p.StepTokens = l.Rate, s.Tokens
	if s.Every != 0 {
		p.Steps = policy.Every(s.Every)
	}
	if s.Cron != "" {
		calendar, err := policy.ParseCalendar(s.Cron, s.TimeZone)
		if err != nil {
			wrong := strings.TrimPrefix(err.Error(), policy.ErrSchedule.Error()+" ")
			d.Bad(here.Field("cron"), "%s: want %s", wrong, wantCron)
		}
		p.Steps = calendar
	}
	s.check(d, here, l)
}

// check reports contradictions between the fields of a rate and those of a schedule.
func (s *steps) check(d *fields.Decoder, here fields.Path, l limits) {
	if l.Rate != (policy.Rate{}) && *s == (steps{}) {
		return
	}
	given := func(name string) bool { return d.Given(here.Field(name)) }
	var ways []string
	for _, way := range []string{"rate", "every", "cron"} {
		if given(way) {
			ways = append(ways, way)
		}
	}
	stepped := given("every") || given("cron")
	switch {
	case len(ways) == 0:
		d.Bad(here.Field("rate"),
			"it is required: want tokens/time such as 500/s. Instead of a rate, every or cron can be set, with tokens")
	case len(ways) > 1:
		d.Bad(here.Field(ways[1]), "want only one of rate, every and cron: %s is set, too", here.Field(ways[0]))
	}
	if given("tokens") && given("rate") && !stepped {
		d.Bad(here.Field("tokens"), "it can be set only with every or cron, not with a rate")
	}
	if stepped && !given("tokens") {
		d.Bad(here.Field("tokens"), "it is required with every and cron: want %s", kinds["tokens"].Want)
	}
	if s.Tokens > l.Capacity && l.Capacity > 0 {
		d.Bad(here.Field("tokens"), "%d is above the capacity, %d: tokens without room would be lost at each step",
			s.Tokens, l.Capacity)
	}
	if given("time_zone") && !given("cron") {
		d.Bad(here.Field("time_zone"), "it can be set only with cron")
	}
}

// policy returns the policy without the times at which tokens fall due.
func (l limits) policy(interval time.Duration) policy.Policy {
	if l.Interval != 0 {
		interval = l.Interval
	}
	return policy.Policy{
		Capacity: l.Capacity, Interval: interval, Initial: l.Initial, OnRollback: l.OnRollback,
		CarryOver: l.CarryOver, Degraded: l.Degraded, Shadow: l.Shadow, Strict: l.Strict, Flows: l.Flows.policy(),
	}
}

// policy returns the division of a bucket among flows, or nil if the bucket isn't divided.
func (f *flows) policy() *policy.Flows {
	if f == nil {
		return nil
	}
	return &policy.Flows{Headroom: f.Headroom, Weights: f.Weights, Most: f.Most}
}

// validate reports the contradictions between fields that package policy finds.
func validate(d *fields.Decoder, here fields.Path, p policy.Policy) {
	for {
		var wrong *policy.FieldError
		if !errors.As(p.Validate(), &wrong) {
			return
		}
		d.Bad(here.Field(wrong.Field), "%s", wrong.Msg)
		if wrong.Field != "initial" {
			return
		}
		p.Initial = nil // find the next problem
	}
}

// templates returns the set of the file's templates, or nil if the file doesn't have the field. names are the names of
// the buckets and pools that have policies of their own.
func (f *file) templates(d *fields.Decoder, names []string) *policy.Templates {
	if f.Templates == nil {
		return nil
	}
	var list []policy.Template
	var paths []fields.Path
	for i := range f.Templates {
		here := root.Field("templates").Item(i)
		if t := f.Templates[i].policy(d, here, f.RefillInterval); d.Valid(here) {
			list, paths = append(list, t), append(paths, here)
		}
	}
	for {
		set, err := policy.NewTemplates(f.Version, list, names)
		var wrong *policy.TemplateError
		if !errors.As(err, &wrong) {
			if err != nil {
				d.Bad(root.Field("templates"), "%s", strings.TrimPrefix(err.Error(), policy.ErrTemplates.Error()+" "))
			}
			return set
		}
		var field *policy.FieldError
		if here := paths[wrong.At]; errors.As(wrong.Err, &field) {
			d.Bad(here.Field(field.Field), "%s", field.Msg)
		} else {
			d.Bad(here, "%s", strings.TrimPrefix(wrong.Err.Error(), policy.ErrTemplates.Error()+" "))
		}
		list = append(list[:wrong.At], list[wrong.At+1:]...) // find the next problem
		paths = append(paths[:wrong.At], paths[wrong.At+1:]...)
	}
}

func (t *template) policy(d *fields.Decoder, here fields.Path, interval time.Duration) policy.Template {
	p := t.limits.policy(interval)
	t.apply(d, here, t.limits, &p)
	if t.Enforce == policy.EnforceLazy {
		p.Interval = policy.MinInterval // there is no refill: each take credits the tokens that are due
	}
	return policy.Template{Prefix: t.Prefix, Policy: p, Enforce: t.Enforce, MaxKeys: t.MaxKeys}
}

// some returns the first few keys as text.
func some(keys []string) string {
	const most = 5
	quoted := make([]string, min(len(keys), most))
	for i := range quoted {
		quoted[i] = fields.Quote(keys[i])
	}
	list := strings.Join(quoted, ", ")
	if more := len(keys) - most; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return list
}
