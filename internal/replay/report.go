package replay

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/internal/replay/accesslog"
)

// Report has the results of the policy. `consumer replay -o json` writes its JSON form.
type Report struct {
	Total    Total              `json:"total"`
	Span     Span               `json:"span"`
	Peak     Peak               `json:"peak"`
	Top      []Key              `json:"top"`
	Unparsed []accesslog.Sample `json:"unparsed_samples"`
}

// Total counts lines and requests.
type Total struct {
	Requests int64 `json:"requests"`
	Admitted int64 `json:"admitted"`
	Denied   int64 `json:"denied"`
	Keys     int64 `json:"keys"`
	Unparsed int64 `json:"unparsed"`
}

// Span is the time that the log covers. Both times are zero for a log without requests.
type Span struct {
	From       time.Time `json:"from,omitzero"`
	To         time.Time `json:"to,omitzero"`
	Seconds    float64   `json:"seconds"`
	OutOfOrder int64     `json:"out_of_order"` // requests with an earlier time than the clock
}

// Peak is the second of the log's clock with the most requests. If several seconds have the most, it is the first.
type Peak struct {
	At       time.Time `json:"at,omitzero"`
	Requests int64     `json:"requests"`
	Denied   int64     `json:"denied"`
}

// Key counts the requests of one key.
type Key struct {
	Key      string `json:"key"`
	Requests int64  `json:"requests"`
	Admitted int64  `json:"admitted"`
	Denied   int64  `json:"denied"`
}

// outcome counts the requests in the order of the log.
type outcome struct {
	total         Total
	outOfOrder    int64
	previous      int64 // time of the previous request; Unix µs
	rose, fell    int64 // numbers of requests that are later or earlier than the previous one
	first, clock  int64 // time of the first request, and the highest time so far; Unix µs
	keys          map[string]*counts
	second        int64 // the second being counted, Unix seconds
	current, peak counts
	peakSecond    int64
}

type counts struct{ requests, denied int64 }

func (c *counts) add(denied bool) {
	c.requests++
	if denied {
		c.denied++
	}
}

func newOutcome() *outcome {
	return &outcome{clock: math.MinInt64, keys: map[string]*counts{}}
}

// count counts a request. at is its time.
func (t *outcome) count(key []byte, at int64, denied bool) {
	if t.total.Requests == 0 {
		t.first = at
	}
	if at < t.clock {
		t.outOfOrder++
	}
	switch {
	case t.total.Requests == 0 || at == t.previous:
	case at > t.previous:
		t.rose++
	default:
		t.fell++
	}
	t.previous = at
	t.clock = max(t.clock, at)
	second := time.UnixMicro(t.clock).Unix()
	if second != t.second {
		t.endSecond()
		t.second = second
	}
	t.current.add(denied)

	t.total.Requests++
	if denied {
		t.total.Denied++
	} else {
		t.total.Admitted++
	}
	c, seen := t.keys[string(key)]
	if !seen {
		c = &counts{}
		t.keys[string(key)] = c
	}
	c.add(denied)
}

func (t *outcome) endSecond() {
	if t.current.requests > t.peak.requests {
		t.peak, t.peakSecond = t.current, t.second
	}
	t.current = counts{}
}

func (t *outcome) report(top int, unparsed accesslog.Unparsed) Report {
	t.endSecond()
	r := Report{Total: t.total, Top: t.top(top), Unparsed: unparsed.Samples}
	r.Total.Keys, r.Total.Unparsed = int64(len(t.keys)), unparsed.Lines
	if r.Unparsed == nil {
		r.Unparsed = []accesslog.Sample{}
	}
	if t.total.Requests > 0 {
		r.Span = Span{
			From: time.UnixMicro(t.first).UTC(), To: time.UnixMicro(t.clock).UTC(),
			Seconds: float64(t.clock-t.first) / 1e6, OutOfOrder: t.outOfOrder,
		}
		r.Peak = Peak{At: time.Unix(t.peakSecond, 0).UTC(), Requests: t.peak.requests, Denied: t.peak.denied}
	}
	return r
}

// top returns the n keys with the most denied requests. Keys with equally many are ordered by their number of requests.
func (t *outcome) top(n int) []Key {
	top := make([]Key, 0, min(n, len(t.keys))+1)
	for name, c := range t.keys {
		k := Key{Key: name, Requests: c.requests, Admitted: c.requests - c.denied, Denied: c.denied}
		if i, _ := slices.BinarySearchFunc(top, k, byDenied); i < n {
			top = slices.Insert(top, i, k)
			top = top[:min(n, len(top))]
		}
	}
	return top
}

func byDenied(a, b Key) int {
	return cmp.Or(cmp.Compare(b.Denied, a.Denied), cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Key, b.Key))
}
