package schedule

import (
	"math/rand/v2"
	"slices"

	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

// Buckets has all buckets that a run may have. A second policy, if there is one, is the bucket's policy in later
// versions of the configuration.
var Buckets = []system.Bucket{
	{Key: "plain", Linear: true, Lines: []string{"capacity: 500, rate: 500/s",
		"capacity: 300, rate: 400/s, carry_over: proportional"}},
	// The cap of its credit is far below its capacity.
	{Key: "deep", Linear: true, Lines: []string{"capacity: 3000, rate: 100/s, initial: 100",
		"capacity: 2000, rate: 150/s"}},
	// Its rate is so low that a lost carry would be detected.
	{Key: "rare", Linear: true, Lines: []string{"capacity: 20, rate: 7/s", "capacity: 10, rate: 11/s"}},
	{Key: "drained", Lines: []string{"capacity: 400, rate: 1000/s", "capacity: 300, rate: 800/s"}},
	{Key: "stepped", Linear: true, Lines: []string{"capacity: 150, every: 700ms, tokens: 60",
		"capacity: 120, every: 1100ms, tokens: 100"}},
	{Key: "minutely", Linear: true, Lines: []string{`capacity: 900, cron: "* * * * *", tokens: 800`,
		`capacity: 800, cron: "* * * * *", time_zone: Africa/Cairo, tokens: 700`}},
	// It is like a quota for a day, which must survive a fail-over.
	{Key: "quota", Linear: true, Lines: []string{"capacity: 500, every: 2s, tokens: 300, on_rollback: keep",
		"capacity: 400, every: 1500ms, tokens: 200, on_rollback: keep"}},
	{Key: "kept", Linear: true, Lines: []string{"capacity: 300, rate: 200/s, on_rollback: keep",
		"capacity: 300, rate: 250/s, on_rollback: keep"}},
	{Key: "whole", Linear: true, Lines: []string{"capacity: 300, rate: 50/s, on_loss: full",
		"capacity: 250, rate: 60/s, on_loss: full"}},
	// It changes between a rate and a schedule.
	{Key: "changed", Linear: true, Lines: []string{"capacity: 200, rate: 100/s",
		"capacity: 200, every: 500ms, tokens: 60"}},
	{Key: "strict", Lines: []string{"capacity: 200, rate: 300/s, strict: true",
		"capacity: 150, rate: 200/s, strict: true"}},
	{Key: "foreign", Kind: record.Foreign, Lines: []string{"capacity: 300, rate: 300/s"}},
	{Key: "begun-anew", Linear: true, Lines: []string{"capacity: 300, rate: 200/s",
		"capacity: 300, rate: 250/s, carry_over: reset"}},
	{Key: "leased", Leased: true, Lines: []string{"capacity: 600, rate: 600/s", "capacity: 500, rate: 500/s"}},
	{Key: "leased-strictly", Leased: true, Lines: []string{"capacity: 600, rate: 600/s, strict: true"}},
	{Key: "operated", Operated: true, Lines: []string{"capacity: 400, rate: 200/s", "capacity: 300, rate: 200/s"}},
	{Key: "divided", Lines: []string{"capacity: 400, rate: 400/s, flows: {}",
		"capacity: 300, rate: 300/s, flows: {headroom: 30%}"}},
	{Key: "shadowed", Lines: []string{"capacity: 200, rate: 100/s, shadow: true"}},
	{Key: "open", Lines: []string{"capacity: 300, rate: 300/s, degraded: open"}},
	{Key: "local", Lines: []string{"capacity: 300, rate: 300/s, degraded: local"}},
	{Key: "user:own", Kind: record.Refilled, Prefix: "user:", Overridden: true, Lines: []string{
		"capacity: 200, rate: 300/s", "capacity: 150, rate: 200/s"}},
	{Key: "few:1", Kind: record.Refilled, Prefix: "few:", MaxKeys: 2, Lines: []string{
		"capacity: 200, rate: 300/s, max_keys: 2"}},
	{Key: "user:1", Kind: record.Refilled, Prefix: "user:", Lines: []string{"capacity: 200, rate: 300/s",
		"capacity: 150, rate: 200/s"}},
	{Key: "guest:1", Kind: record.Lazy, Prefix: "guest:", Lines: []string{"capacity: 100, rate: 200/s"}},
	{Key: "payments", Kind: record.Pooled,
		Lines: []string{"rate: 400/s, capacity: 400, regions: {here: {floor: 80/s}}"}},
}

// drawn is the number of buckets of a run. With more buckets, the machine would make too few calls for each.
const drawn = 6

// Pick returns the buckets with the given keys.
func Pick(keys ...string) (list []system.Bucket) {
	for _, b := range Buckets {
		if slices.Contains(keys, b.Key) {
			list = append(list, b)
		}
	}
	return list
}

// forOperations has the keys of buckets that exist for operations of consumers and operators, and not for faults.
var forOperations = []string{"begun-anew", "leased", "leased-strictly", "operated", "divided", "shadowed", "open",
	"local", "user:own", "few:1"}

// forFaults returns the buckets that are not in forOperations.
func forFaults() []system.Bucket {
	return slices.DeleteFunc(slices.Clone(Buckets), func(b system.Bucket) bool {
		return slices.Contains(forOperations, b.Key)
	})
}

// drawBuckets picks random buckets of a list that the system supports. The first one is always among them.
func drawBuckets(spec system.Spec, list []system.Bucket, rng *rand.Rand) []system.Bucket {
	keys := []string{list[0].Key}
	for _, i := range rng.Perm(len(list)) {
		b := list[i]
		if len(keys) == drawn || i == 0 || b.Kind == record.Pooled && spec.Etcd == 0 {
			continue
		}
		keys = append(keys, b.Key)
	}
	return Pick(keys...)
}

// drawThroughSDK picks random buckets that the system supports. It also draws the buckets that consumers use through
// the SDK: these are not Linear.
func drawThroughSDK(spec system.Spec, rng *rand.Rand) []system.Bucket {
	list := drawBuckets(spec, Buckets, rng)
	for i := range list {
		// A take through the SDK isn't a single operation on a bucket: the SDK returns the tokens of an abandoned take.
		through := spec.Consumers == deck.Sidecar || spec.Consumers == deck.Plain || rng.IntN(3) == 0
		list[i].Linear = list[i].Linear && !through
	}
	return list
}
