package httplimit

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
)

// maxInteger is the largest integer of a structured field.
const maxInteger = 999_999_999_999_999

// setHeaders describes the limit to the client. In RateLimit, t is the time until more tokens are available. On a
// denial, it is the time until the requested tokens are available. X-RateLimit-Reset is the same time on a denial.
// Otherwise it is the time until all tokens are available. RateLimit and RateLimit-Policy are lists: entries of a
// middleware around this one stay.
func (m *Middleware) setHeaders(h http.Header, d Decision) {
	if !m.config.NoHeaders {
		var policies, states []string
		for _, l := range d.Limits {
			if l.Limit == 0 {
				continue // the policy is unknown: no number would be true
			}
			name := quoted(l.Name)
			if l.Limit > 0 && l.Limit <= maxInteger {
				policy := name + ";q=" + strconv.FormatInt(l.Limit, 10)
				if w := seconds(l.Window); w > 0 {
					policy += ";w=" + strconv.FormatInt(w, 10)
				}
				policies = append(policies, policy)
			}
			state := name + ";r=" + strconv.FormatInt(min(max(0, l.Remaining), maxInteger), 10)
			if t := untilMore(l.Result); t != fetch.Never {
				state += ";t=" + strconv.FormatInt(seconds(t), 10)
			}
			states = append(states, state)
		}
		if len(policies) > 0 {
			h.Add("RateLimit-Policy", strings.Join(policies, ", "))
		}
		if len(states) > 0 {
			h.Add("RateLimit", strings.Join(states, ", "))
		}
	}
	if m.config.XHeaders && d.Limit > 0 {
		h.Set("X-RateLimit-Limit", strconv.FormatInt(d.Limit, 10))
		h.Set("X-RateLimit-Remaining", strconv.FormatInt(max(0, d.Remaining), 10))
		if t := untilReset(d.Result); t != fetch.Never {
			h.Set("X-RateLimit-Reset", strconv.FormatInt(m.now().Add(t+time.Second-1).Unix(), 10))
		}
	}
	if !d.OK && d.RetryAfter != fetch.Never {
		after := seconds(d.RetryAfter)
		if j := seconds(m.config.Jitter); j > 0 {
			after += m.random(j + 1)
		}
		h.Set("Retry-After", strconv.FormatInt(max(1, after), 10))
	}
}

func untilMore(r fetch.Result) time.Duration {
	if !r.OK {
		return r.RetryAfter
	}
	return r.MoreAfter
}

func untilReset(r fetch.Result) time.Duration {
	if !r.OK {
		return r.RetryAfter
	}
	return r.ResetAfter
}

// seconds returns d in seconds, rounded up. Otherwise a client that comes back at that time would be denied again.
func seconds(d time.Duration) int64 {
	s := int64(d / time.Second)
	if d%time.Second > 0 {
		s++
	}
	return s
}

// quoted returns s as a string of a structured field.
func quoted(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// problem is the draft's problem document of a denial, as RFC 9457 has it.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Detail   string   `json:"detail,omitempty"`
	Violated []string `json:"violated-policies"`
}

const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"
