package config

import (
	"errors"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// buckets reads the buckets; none is fine where there is something else to
// refill.
func buckets(v value, interval time.Duration, others bool) []Bucket {
	items := v.list()
	if !others && (!v.present() || v.node.Kind == yaml.SequenceNode && len(items) == 0) {
		v.bad("there is no bucket to refill: want at least one, such as {key: checkout, capacity: 1000, rate: 500/s}")
	}
	list := make([]Bucket, 0, len(items))
	first := make(map[string]value, len(items))
	for _, item := range items {
		b, key := bucket(item, interval)
		if b.Key != "" {
			if other, twice := first[b.Key]; twice {
				key.bad("%q is already the key of the bucket %s: a bucket is configured once", brief(b.Key), other.line())
				continue
			}
			first[b.Key] = key
		}
		list = append(list, b)
	}
	return list
}

// bucket reads one bucket and returns the value of its key too.
func bucket(v value, interval time.Duration) (Bucket, value) {
	d := v.d
	before := len(d.problems)
	o := v.object([]string{"key", "capacity", "rate", "every", "cron", "tokens", "time_zone", "initial", "interval",
		"on_loss", "on_rollback", "carry_over", "degraded", "shadow", "strict"})
	key := o.field("key")
	if v.node.Kind != yaml.MappingNode {
		return Bucket{}, key
	}
	b := Bucket{Key: bucketKey(key), Policy: readPolicy(o, interval)}
	schedule(o, &b.Policy)
	if len(d.problems) == before {
		validate(o, b.Policy)
	}
	return b, key
}

// readPolicy reads what the policies of buckets and templates have in common: all but when tokens fall due.
func readPolicy(o object, interval time.Duration) policy.Policy {
	p := policy.Policy{Interval: interval}
	capacity := o.field("capacity")
	if p.Capacity, _ = capacity.integer(1, policy.MaxTokens); !capacity.present() {
		capacity.bad("it is required: want a whole number from 1 to %d", int64(policy.MaxTokens))
	}
	if n, ok := o.field("initial").integer(0, policy.MaxTokens); ok {
		p.Initial = &n
	}
	if i, ok := o.field("interval").interval(); ok {
		p.Interval = i
	}
	p.OnLoss = policy.Loss(o.field("on_loss").choice("empty", "full"))
	p.OnRollback = policy.Rollback(o.field("on_rollback").choice("empty", "keep"))
	p.CarryOver = policy.CarryOver(o.field("carry_over").choice("keep", "proportional", "reset"))
	p.Degraded = policy.Degraded(o.field("degraded").choice("closed", "open", "local"))
	p.Shadow = o.field("shadow").choice("false", "true") == 1
	p.Strict = o.field("strict").choice("false", "true") == 1
	return p
}

func bucketKey(v value) string {
	const want = "a bucket's name of 1 to 512 bytes without }"
	if !v.present() {
		v.bad("it is required: want %s", want)
		return ""
	}
	s, ok := v.text(want)
	if !ok {
		return ""
	}
	if err := lua.CheckKey(s); err != nil {
		v.bad("%q: want %s", brief(s), want)
		return ""
	}
	return s
}

// schedule reads the one way in which tokens fall due.
func schedule(o object, p *policy.Policy) {
	var given []value
	for _, name := range []string{"rate", "every", "cron"} {
		if v := o.field(name); v.present() {
			given = append(given, v)
		}
	}
	tokens, zone := o.field("tokens"), o.field("time_zone")
	rate, every, cron := o.field("rate"), o.field("every"), o.field("cron")
	stepped := every.present() || cron.present()
	switch {
	case len(given) == 0:
		rate.bad("it is required: want tokens/time such as 500/s, or instead of a rate every or cron, with tokens")
	case len(given) > 1:
		given[1].bad("a bucket has one of rate, every and cron: %s is there already", given[0].path)
	}
	if tokens.present() && rate.present() && !stepped {
		tokens.bad("it goes with every or cron, not with a rate")
	}
	if stepped && !tokens.present() {
		tokens.bad("it is required with every and cron: want a whole number from 1 to %d", int64(policy.MaxTokens))
	}
	if zone.present() && !cron.present() {
		zone.bad("it goes with cron only")
	}

	if r, ok := readRate(rate); ok {
		p.Rate = r
	}
	p.StepTokens, _ = tokens.integer(1, policy.MaxTokens)
	if d, ok := every.duration(policy.MinInterval, policy.MaxPer, time.Microsecond); ok {
		p.Steps = policy.Every(d)
	}
	location := readZone(zone)
	if s, ok := cron.text("five fields: minute, hour, day of month, month, day of week"); ok {
		calendar, err := policy.ParseCalendar(s, location)
		if err != nil {
			cron.bad("%s: want five fields: minute, hour, day of month, month, day of week; or a word such as @daily",
				brief(unwrapped(err, policy.ErrSchedule)))
			return
		}
		p.Steps = calendar
	}
}

func readRate(v value) (policy.Rate, bool) {
	const want = "tokens/time such as 500/s, 10/m or 1000/24h"
	if v.node != nil && wholeNumber.MatchString(v.node.Value) {
		v.bad("%s has no time: want %s", describe(v.node), want)
		return policy.Rate{}, false
	}
	s, ok := v.text(want)
	if !ok {
		return policy.Rate{}, false
	}
	if brief(s) != s {
		v.bad("%q: want %s", brief(s), want)
		return policy.Rate{}, false
	}
	r, err := policy.ParseRate(s)
	if err != nil {
		v.bad("%s", unwrapped(err, policy.ErrRate))
		return policy.Rate{}, false
	}
	return r, true
}

func readZone(v value) *time.Location {
	const want = "the name of a time zone such as Europe/Berlin or UTC"
	s, ok := v.text(want)
	if !ok {
		return time.UTC
	}
	zone, err := time.LoadLocation(s)
	if err != nil || strings.EqualFold(s, "local") { // whose meaning differs between replicas
		v.bad("%q: want %s", brief(s), want)
		return time.UTC
	}
	return zone
}

// validate reports what package policy finds wrong between fields.
func validate(o object, p policy.Policy) {
	for {
		var wrong *policy.FieldError
		if !errors.As(p.Validate(), &wrong) {
			return
		}
		at := o.field(wrong.Field)
		at.bad("%s", wrong.Msg)
		if wrong.Field != "initial" {
			return
		}
		p.Initial = nil // and on to what else is wrong
	}
}
