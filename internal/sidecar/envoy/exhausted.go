package envoy

import (
	"sync"
	"time"

	"github.com/tokenrefill/refiller/fetch"
)

// longestDenial is the longest time for which a window is denied from memory. It is short because other sidecars may
// return tokens to the window, for example those of a request that another descriptor denies.
const longestDenial = time.Second

// windowID identifies a window.
type windowID struct {
	quota quota
	key   string
}

// exhausted remembers windows that have no tokens left. So repeated requests for them don't reach Redis. It is safe for
// concurrent use.
type exhausted struct {
	most int
	now  func() time.Time

	mu      sync.Mutex
	windows map[windowID]denial
}

// denial is the remembered state of a window.
type denial struct {
	limit int64
	until time.Time // from then on Redis decides again
	ends  time.Time // when the window ends
}

func newExhausted(most int, now func() time.Time) *exhausted {
	return &exhausted{most: most, now: now, windows: make(map[windowID]denial)}
}

// denial returns the remembered denial of a window, if any.
func (e *exhausted) denial(id windowID) (fetch.Result, bool) {
	if e.most == 0 {
		return fetch.Result{}, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	d, ok := e.windows[id]
	if !ok {
		return fetch.Result{}, false
	}
	now := e.now()
	if !now.Before(d.until) {
		delete(e.windows, id)
		return fetch.Result{}, false
	}
	left := d.ends.Sub(now)
	return fetch.Result{
		Limit: d.limit, RetryAfter: left, ResetAfter: left, Source: fetch.Source{Kind: fetch.SourceCached},
	}, true
}

// remember records the result of a take if it is a denial by a window without tokens.
func (e *exhausted) remember(id windowID, r fetch.Result) {
	if e.most == 0 || r.OK || r.Remaining > 0 || r.ResetAfter <= 0 || r.ResetAfter == fetch.Never {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.now()
	if len(e.windows) >= e.most {
		e.dropExpired(now)
	}
	if len(e.windows) >= e.most {
		return
	}
	e.windows[id] = denial{r.Limit, now.Add(min(r.ResetAfter, longestDenial)), now.Add(r.ResetAfter)}
}

func (e *exhausted) dropExpired(now time.Time) {
	for id, d := range e.windows {
		if !now.Before(d.until) {
			delete(e.windows, id)
		}
	}
}

// forget removes a window to which tokens were returned.
func (e *exhausted) forget(id windowID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.windows, id)
}
