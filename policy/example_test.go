package policy_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

func ExampleParseRate() {
	r, err := policy.ParseRate("1000/24h")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(r, "is", r.Over(time.Hour), "in an hour; one takes", r.TimeFor(1))
	_, err = policy.ParseRate("0/s")
	fmt.Println(err)
	// Output:
	// 1000/24h is 41 in an hour; one takes 1m26.4s
	// policy: bad rate 0/s: tokens must be a whole number from 1 to 1125899906842624
}

func ExamplePolicy_Validate() {
	p := policy.Policy{Capacity: 99, Rate: policy.PerSecond(500), Interval: 100 * time.Millisecond}
	err := p.Validate()
	var field *policy.FieldError
	if errors.As(err, &field) {
		fmt.Println(field.Field)
	}
	fmt.Println(err)
	// Output:
	// capacity
	// policy: capacity: 99 is below 100, the tokens of two refill intervals of 100ms at 500/s: raise it, or lower the interval
}

func ExamplePolicy_Terms() {
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500)}
	terms := p.Terms(policy.Fence{Epoch: 7}) // the config's version
	fmt.Println(terms.Encode())
	read, err := policy.DecodeTerms(terms.Encode())
	fmt.Println(read == terms, err)
	// Output:
	// 7 0 1000 1 2000 100000
	// true <nil>
}

func ExampleParseCalendar() {
	daily, err := policy.ParseCalendar("0 6 * * 1-5", time.UTC)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(daily.Next(time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)))
	_, err = policy.ParseCalendar("0 0 31 2 *", time.UTC)
	fmt.Println(err)
	// Output:
	// 2026-01-05 06:00:00 +0000 UTC
	// policy: bad schedule "0 0 31 2 *": no such day comes
}

// A refiller was stopped for some hours. The bucket holds the tokens of two steps, so Due passes over older steps.
func ExampleDue() {
	stored := time.Date(2026, 1, 1, 3, 0, 0, 0, time.UTC)
	now := time.Date(2026, 1, 1, 9, 30, 0, 0, time.UTC)
	due, next := policy.Due(policy.Every(time.Hour), stored.UnixMicro(), now.UnixMicro(), 2)
	fmt.Println(time.UnixMicro(due).UTC().Format("15:04"), "then", time.UnixMicro(next).UTC().Format("15:04"))
	// Output: 08:00 then 09:00
}

// A bucket in memory is created, refilled and taken from, at times that the caller chooses.
func ExampleBucket() {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Initial: new(int64)}.Terms(policy.Fence{Epoch: 1})
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

	var b policy.Bucket
	created := b.Refill(policy.Call{Create: policy.CreateInitial, Terms: &terms}, now)
	fmt.Println(created.Status, created.Tokens)

	denied := b.Take(20, now)
	fmt.Println(denied.OK, time.Duration(denied.Wait)*time.Microsecond)

	now += denied.Wait
	out := b.Refill(policy.Call{Version: created.Version, Terms: &terms}, now)
	fmt.Println(out.Status, out.Added)
	fmt.Println(b.Take(20, now).OK)

	again := b.Refill(policy.Call{Version: created.Version, Terms: &terms}, now) // the same call once more
	fmt.Println(again.Status, again.Added)
	// Output:
	// initialised 0
	// false 100ms
	// applied 50
	// true
	// stale 0
}
