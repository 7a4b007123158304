package history

import (
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// Refill is one refill call for one bucket, as the caller knows it.
type Refill struct {
	Key     string          `json:"key"`
	Sent    int64           `json:"sent"`    // just before the call's batch was sent, Unix ns on the caller's clock
	Replied int64           `json:"replied"` // when the reply came or the call failed, Unix ns on the caller's clock
	Era     int64           `json:"era"`     // Era and Index are the version that the caller sent
	Index   int64           `json:"index"`
	Create  int64           `json:"create,omitempty"` // as in policy.Call
	Terms   string          `json:"terms,omitempty"`  // the policy sent, as policy.Terms encodes it
	Step    int64           `json:"step,omitempty"`
	Next    int64           `json:"next,omitempty"`
	Outcome *policy.Outcome `json:"outcome,omitempty"` // nil if there was no reply
	Error   string          `json:"error,omitempty"`
}

// OfEvent converts an event to a record.
func OfEvent(e refill.Event) Refill {
	r := Refill{
		Key: e.Key, Sent: e.Sent.UnixNano(), Replied: e.Replied.UnixNano(),
		Era: e.Call.Version.Era, Index: e.Call.Version.Index, Create: int64(e.Call.Create), Step: e.Call.Step,
		Next: e.Call.Next,
	}
	if e.Call.Terms != nil {
		r.Terms = e.Call.Terms.Encode()
	}
	if e.Err != nil {
		r.Error = e.Err.Error()
	} else {
		r.Outcome = &e.Outcome
	}
	return r
}
