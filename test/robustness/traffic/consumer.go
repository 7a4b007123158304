package traffic

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// consumer takes tokens through the SDK or the sidecar.
type consumer interface {
	take(ctx context.Context, key string, n, leave int64) (fetch.Result, error)
	reserve(ctx context.Context, key string, n int64, ttl time.Duration, overrun policy.Overrun) (reservation, error)
}

// reservation is the result of a reservation, which may be a denial.
type reservation struct {
	fetch.Result
	settle func(ctx context.Context, used int64) (policy.Settlement, error)
}

// sdk takes tokens through a client of the SDK.
type sdk struct {
	*fetch.Client
	flow string // the flow that it takes for; may be empty
}

// with returns the options of a call, and WithFlow if s has a flow.
func (s sdk) with(opts ...fetch.CallOption) []fetch.CallOption {
	if s.flow != "" {
		opts = append(opts, fetch.WithFlow(s.flow))
	}
	return opts
}

func (s sdk) take(ctx context.Context, key string, n, leave int64) (fetch.Result, error) {
	return s.Take(ctx, key, n, s.with(fetch.WithLeave(leave))...)
}

func (s sdk) reserve(ctx context.Context, key string, n int64, ttl time.Duration,
	overrun policy.Overrun) (reservation, error) {
	r, err := s.Reserve(ctx, key, n, ttl, s.with(fetch.WithOverrun(overrun))...)
	if err != nil {
		return reservation{}, err
	}
	return reservation{r.Result, func(ctx context.Context, used int64) (policy.Settlement, error) {
		settled, err := r.Settle(ctx, used)
		return settled.Settlement, err
	}}, nil
}

// sidecar takes tokens through HTTP connections to the sidecar, which all callers share.
type sidecar struct {
	url  string
	http *http.Client
	flow string // the flow that it takes for; may be empty
}

// forFlow returns a consumer that takes for a flow through the same connections.
func (s *sidecar) forFlow(flow string) *sidecar { return &sidecar{s.url, s.http, flow} }

// words returns the fields of a request that every take has.
func (s *sidecar) words(key string, n int64) map[string]any {
	words := map[string]any{"key": key, "tokens": n}
	if s.flow != "" {
		words["flow"] = s.flow
	}
	return words
}

// patient is the timeout of a request. It is longer than a call may last in the sidecar.
const patient = 10 * time.Second

func newSidecar(url string) *sidecar {
	return &sidecar{url: url, http: &http.Client{
		Timeout: patient, Transport: &http.Transport{MaxIdleConnsPerHost: 64},
	}}
}

func (s *sidecar) take(ctx context.Context, key string, n, leave int64) (fetch.Result, error) {
	var r answer.Result
	request := s.words(key, n)
	request["leave"] = fmt.Sprint(leave)
	err := s.call(ctx, "take", request, &r)
	return resultOf(r), err
}

func (s *sidecar) reserve(ctx context.Context, key string, n int64, ttl time.Duration,
	overrun policy.Overrun) (reservation, error) {
	how := "clamp"
	if overrun == policy.OverrunDebt {
		how = "debt"
	}
	var r answer.Reservation
	request := s.words(key, n)
	request["ttl_ms"], request["overrun"] = ttl.Milliseconds(), how
	err := s.call(ctx, "reserve", request, &r)
	if err != nil || r.ID == nil {
		return reservation{Result: resultOf(r.Result)}, err
	}
	return reservation{resultOf(r.Result), func(ctx context.Context, used int64) (policy.Settlement, error) {
		var a answer.Settlement
		err := s.call(ctx, "settle", map[string]any{"key": key, "id": *r.ID, "used": used}, &a)
		return policy.Settlement{Returned: a.Returned, Charged: a.Charged, Owed: a.Owed, Forgiven: a.Forgiven}, err
	}}, nil
}

func resultOf(r answer.Result) fetch.Result {
	res := fetch.Result{OK: r.OK, Taken: r.Taken, Remaining: r.Remaining, Shadow: r.Shadow}
	for kind := fetch.SourceShared; kind <= fetch.SourceFallback; kind++ {
		if strings.HasPrefix(r.Source, kind.String()) { // a reason may follow the kind
			res.Source.Kind = kind
		}
	}
	return res
}

var errRefused = errors.New("traffic: the sidecar refused")

func (s *sidecar) call(ctx context.Context, what string, request, reply any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/"+what, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode == http.StatusOK {
		return json.NewDecoder(res.Body).Decode(reply)
	}
	var refusal struct{ Code, Message string }
	if err := json.NewDecoder(res.Body).Decode(&refusal); err != nil {
		return err
	}
	switch refusal.Code {
	case "unknown_bucket":
		return lua.ErrUnknownBucket
	case "exceeds_capacity":
		return fetch.ErrExceedsCapacity
	case "too_many_buckets":
		return lua.ErrTooManyBuckets
	}
	return fmt.Errorf("%w: %d %s: %s", errRefused, res.StatusCode, refusal.Code, refusal.Message)
}
