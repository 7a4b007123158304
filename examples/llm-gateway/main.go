// Command llm-gateway is a proxy before an LLM API that streams, with a budget of tokens for each team and each user.
// A request takes an estimate from both buckets, or from none; when its stream has ended, or its client has gone, what
// was not used goes back. It wants a Redis on 127.0.0.1:6379 and no refiller, and speaks to a fake model of its own:
//
//	curl -N -H 'X-Team: red' -H 'X-User: ann' -d '{"max_tokens": 50}' http://127.0.0.1:8080/v1/chat/completions
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strconv"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/policy"
)

func main() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	go func() { _ = http.ListenAndServe("127.0.0.1:8081", fakeLLM{pace: fiftyMS}) }() // it is reached, or it isn't
	client, err := fetch.New(rdb, fetch.WithTemplates(budget("team:", 100_000, 1_000), budget("user:", 20_000, 200)))
	if err == nil {
		err = http.ListenAndServe("127.0.0.1:8080", newGateway(client, "127.0.0.1:8081", hclog.Default()))
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// budget is a bucket for every key with the prefix.
func budget(prefix string, capacity, perSecond int64) policy.Template {
	p := policy.Policy{Capacity: capacity, Rate: policy.PerSecond(perSecond)}
	return policy.Template{Prefix: prefix, Enforce: policy.EnforceLazy, Policy: p}
}

// gateway charges for what it passes on.
type gateway struct {
	client *fetch.Client
	proxy  *httputil.ReverseProxy
	log    hclog.Logger
}

func newGateway(client *fetch.Client, upstream string, log hclog.Logger) *gateway {
	g := &gateway{client: client, log: log}
	g.proxy = &httputil.ReverseProxy{
		FlushInterval: -1, // events are passed on as they come
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: upstream})
			r.Out.Header.Set("Accept-Encoding", "identity") // the meter reads the stream
		},
		ModifyResponse: func(res *http.Response) error {
			ok := res.StatusCode == http.StatusOK
			res.Body = &meter{ReadCloser: res.Body, charge: chargeOf(res.Request.Context()), ok: ok}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			c, used := chargeOf(r.Context()), int64(0) // nothing was generated
			if r.Context().Err() != nil {
				used = c.prompt // the client has gone, and the model may read its prompt
			}
			c.settle(used)
			log.Warn("upstream failed", "error", err)
			refuse(w, http.StatusBadGateway, "upstream_failed", "the model can't be reached")
		},
	}
	return g
}

// ServeHTTP takes an estimate, passes the request on, and leaves the rest to the meter.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	team, user := r.Header.Get("X-Team"), r.Header.Get("X-User") // set by the proxy that authenticates the caller
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
	ask := struct {
		MaxTokens int64 `json:"max_tokens"`
	}{1024}
	if err == nil {
		err = json.Unmarshal(body, &ask)
	}
	if err != nil || ask.MaxTokens < 1 || ask.MaxTokens > 1<<20 || team == "" || user == "" {
		refuse(w, http.StatusBadRequest, "invalid_request", "want X-Team, X-User, and JSON with max_tokens from 1 to 1048576")
		return
	}
	prompt := int64(len(body)+3) / 4 // four bytes a token
	c := &charge{gateway: g, prompt: prompt, estimate: prompt + ask.MaxTokens, ctx: context.WithoutCancel(r.Context())}
	for _, key := range []string{"team:" + team, "user:" + team + "/" + user} {
		c.requests = append(c.requests, fetch.Request{Key: key, N: c.estimate})
	}
	all, err := g.client.TakeAll(r.Context(), c.requests)
	switch {
	case err != nil:
		g.log.Warn("no decision", "error", err)
		o := limit.OutcomeOf(err)
		refuse(w, o.HTTP, o.Code, "no decision about the tokens")
	case !all.OK:
		w.Header().Set("Retry-After", strconv.Itoa(int(all.RetryAfter.Seconds())+1))
		refuse(w, http.StatusTooManyRequests, "rate_limit_exceeded", all.Denied+" has too few tokens")
	default:
		c.results = all.Results
		r.Body = io.NopCloser(bytes.NewReader(body))
		g.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), chargeKey{}, c)))
	}
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"code": code, "message": message}})
}
