// Package answer has the JSON form of the SDK's results. The command line prints it and the sidecar sends it, so one
// program can read the output of both. The package only converts.
package answer

import (
	"time"

	"github.com/tokenrefill/refiller/fetch"
)

// Result is a [fetch.Result].
type Result struct {
	Key          string `json:"key"`
	OK           bool   `json:"ok"`
	Taken        int64  `json:"taken"`
	Remaining    int64  `json:"remaining"`
	Limit        int64  `json:"limit"`
	RetryAfterMS *int64 `json:"retry_after_ms"`
	ResetAfterMS *int64 `json:"reset_after_ms"`
	Source       string `json:"source"`
	OnFloor      bool   `json:"on_floor,omitempty"`
	Outstanding  int64  `json:"outstanding,omitempty"`
	Shadow       bool   `json:"shadow,omitempty"` // a bucket in shadow mode would have denied it
}

// SourceShadow is the source of an answer whose tokens a bucket in shadow mode lacked.
const SourceShadow = "shadow"

// Source returns the source of r as text. If a bucket in shadow mode lacked tokens of r, it is SourceShadow. Otherwise
// a caller could return tokens that no bucket gave.
func Source(r fetch.Result) string {
	if r.Shadow && r.Source.Kind != fetch.SourceFallback {
		return SourceShadow
	}
	return r.Source.String()
}

// NewResult converts r, a result of the bucket key.
func NewResult(key string, r fetch.Result) Result {
	return Result{
		Key: key, OK: r.OK, Taken: r.Taken, Remaining: r.Remaining, Limit: r.Limit,
		RetryAfterMS: millis(r.RetryAfter), ResetAfterMS: millis(r.ResetAfter), Source: Source(r), OnFloor: r.OnFloor,
		Outstanding: r.Outstanding, Shadow: r.Shadow,
	}
}

// millis converts a time to milliseconds, rounded up, so that a caller waits long enough. An unknown time is null.
func millis(d time.Duration) *int64 {
	if d == fetch.Never {
		return nil
	}
	ms := d.Milliseconds()
	if d%time.Millisecond > 0 {
		ms++
	}
	return &ms
}

// All is a [fetch.AllResult].
type All struct {
	OK           bool     `json:"ok"`
	Denied       *string  `json:"denied"` // null if OK
	RetryAfterMS *int64   `json:"retry_after_ms"`
	Results      []Result `json:"results"`
}

// NewAll converts r, the result of taking for reqs.
func NewAll(reqs []fetch.Request, r fetch.AllResult) All {
	all := All{OK: r.OK, RetryAfterMS: millis(r.RetryAfter), Results: make([]Result, len(r.Results))}
	if !r.OK {
		all.Denied = &r.Denied
	}
	for i, one := range r.Results {
		all.Results[i] = NewResult(reqs[i].Key, one)
	}
	return all
}

// Return is the reply to a return of tokens.
type Return struct {
	Key    string `json:"key"`
	Tokens int64  `json:"tokens"`
}

// Wait is the reply to a wait.
type Wait struct {
	Key      string `json:"key"`
	OK       bool   `json:"ok"`
	Taken    int64  `json:"taken"`
	WaitedMS int64  `json:"waited_ms"`
	Source   string `json:"source"`
	Shadow   bool   `json:"shadow,omitempty"`
}

// NewWait converts r, the result of a wait for tokens of the bucket key, and the length of the wait. r is empty if the
// tokens did not come in time.
func NewWait(key string, r fetch.Result, waited time.Duration) Wait {
	return Wait{
		Key: key, OK: r.OK, Taken: r.Taken, WaitedMS: waited.Milliseconds(), Source: Source(r), Shadow: r.Shadow,
	}
}

// Reservation is a [fetch.Reservation].
type Reservation struct {
	Result
	ID    *string    `json:"id"` // null if there are no tokens to settle
	Until *time.Time `json:"until"`
}

// NewReservation converts r.
func NewReservation(r *fetch.Reservation) Reservation {
	answer := Reservation{Result: NewResult(r.Key, r.Result)}
	if !r.Until.IsZero() {
		until := r.Until.UTC()
		answer.ID, answer.Until = &r.ID, &until
	}
	return answer
}

// Settlement is a [fetch.Settlement].
type Settlement struct {
	Key       string `json:"key"`
	ID        string `json:"id"`
	Returned  int64  `json:"returned"`
	Clamped   int64  `json:"clamped"`
	Void      int64  `json:"void"`
	Charged   int64  `json:"charged"`
	Owed      int64  `json:"owed"`
	Forgiven  int64  `json:"forgiven"`
	Remaining int64  `json:"remaining"`
	Again     bool   `json:"again"`
}

// NewSettlement converts s, the settlement of the reservation id of the bucket key.
func NewSettlement(key, id string, s fetch.Settlement) Settlement {
	return Settlement{
		Key: key, ID: id, Returned: s.Returned, Clamped: s.Clamped, Void: s.Void, Charged: s.Charged, Owed: s.Owed,
		Forgiven:  s.Forgiven,
		Remaining: s.Remaining, Again: s.Again,
	}
}
