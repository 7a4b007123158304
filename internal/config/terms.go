package config

import (
	"cmp"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// Difference is a field whose value in a file differs from the one in force. Both values are written as in a file.
type Difference struct {
	Field   string `json:"field"`
	InForce string `json:"in_force"` // empty if the policy in force doesn't have the field
	File    string `json:"file"`     // empty if the file doesn't have the field
}

// Differences returns the differences between the terms of a bucket that are in force and the terms of a file. It
// ignores fences and the grants of pools.
func Differences(inForce, file policy.Terms) []Difference {
	var list []Difference
	was, is := written(inForce), written(file)
	for i := range was {
		if was[i].text != is[i].text {
			list = append(list, Difference{was[i].field, was[i].text, is[i].text})
		}
	}
	return list
}

// BucketDifferences returns the differences between a bucket in Redis and the policy of a file. Redis stores only two
// instants of a schedule, the last one and the next. If two schedules agree on these, no difference is found.
func BucketDifferences(p lua.PeekReply, file policy.Policy) []Difference {
	list := Differences(*p.Terms, file.Terms(policy.Fence{}))
	if p.Terms.Pool {
		list = append([]Difference{{Field: "kind", InForce: "pool", File: "bucket"}}, list...)
	}
	if file.Steps == nil || p.Step == 0 || p.Next == 0 {
		return list
	}
	if next := file.Steps.Next(time.UnixMicro(p.Step)); next.UnixMicro() != p.Next {
		inForce := "next " + time.UnixMicro(p.Next).UTC().Format(time.RFC3339)
		list = append(list, Difference{Field: "schedule", InForce: inForce, File: file.Steps.String()})
	}
	return list
}

// PoolDifferences returns the differences between a pool that is in force and a pool of a file.
func PoolDifferences(inForce, file pool.Pool) []Difference {
	before, after := writtenPool(inForce), writtenPool(file)
	was := map[string]string{}
	for _, f := range before {
		was[f.field] = f.text
	}
	var list []Difference
	for _, f := range after {
		if was[f.field] != f.text {
			list = append(list, Difference{f.field, was[f.field], f.text})
		}
		delete(was, f.field)
	}
	for _, f := range before {
		if text, gone := was[f.field]; gone {
			list = append(list, Difference{f.field, text, ""})
		}
	}
	return list
}

// writtenPool returns the fields of a pool as a file would have them. It leaves out optional fields of regions that
// have their defaults.
func writtenPool(p pool.Pool) []writtenField {
	rate := func(r policy.Rate) string { return r.InUnits().String() }
	list := []writtenField{
		{"rate", rate(p.Rate)},
		{"capacity", strconv.FormatInt(p.Capacity, 10)},
		{"interval", cmp.Or(p.Interval, policy.DefaultInterval).String()},
		{"floor_share", strconv.FormatInt(cmp.Or(p.FloorShare, pool.DefaultFloorShare), 10) + "%"},
	}
	for _, r := range p.Regions {
		at := "regions." + r.Name
		list = append(list, writtenField{at + ".weight", strconv.FormatInt(r.Weight, 10)})
		if r.Floor != (policy.Rate{}) {
			list = append(list, writtenField{at + ".floor", rate(r.Floor)})
		}
		if r.Burst != 0 {
			list = append(list, writtenField{at + ".burst", strconv.FormatInt(r.Burst, 10)})
		}
		if r.Ceiling != (policy.Rate{}) {
			list = append(list, writtenField{at + ".ceiling", rate(r.Ceiling)})
		}
	}
	return list
}

type writtenField struct{ field, text string }

// written returns the fields of a bucket as a file would have them, always the same ones in the same order.
func written(t policy.Terms) []writtenField {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	rate := t.Rate().InUnits().String()
	tokens := ""
	initial := "the capacity"
	if t.Kind == policy.Stepped {
		rate, tokens = "", number(t.Tokens)
	}
	if t.Initial != t.Capacity {
		initial = number(t.Initial)
	}
	return []writtenField{
		{"capacity", number(t.Capacity)},
		{"rate", rate},
		{"tokens", tokens},
		{"initial", initial},
		{"interval", (time.Duration(t.Interval) * time.Microsecond).String()},
		{"on_loss", losses[t.OnLoss]},
		{"on_rollback", rollbacks[t.OnRollback]},
		{"carry_over", carryOvers[t.CarryOver]},
		{"degraded", degradeds[t.Degraded]},
		{"shadow", strconv.FormatBool(t.Shadow)},
		{"strict", strconv.FormatBool(t.Strict)},
		{"flows", strconv.FormatBool(t.Divided)},
	}
}
