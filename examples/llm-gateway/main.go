// Command llm-gateway is a proxy in front of an LLM API that streams its responses. Each team and each user has a
// monthly budget of tokens. A request reserves an estimate in both budgets, or in none. When the stream has ended or
// the client has disconnected, both reservations are settled with the number of tokens that were used. The command
// needs a Redis on 127.0.0.1:6379, but no refiller. It contains a fake model, so it can be tried with:
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
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/policy"
)

func main() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	go func() { _ = http.ListenAndServe("127.0.0.1:8081", fakeLLM{pace: fiftyMS}) }() // if it fails, requests get errors
	monthly, err := policy.ParseCalendar("0 0 1 * *", time.UTC)
	var client *fetch.Client
	if err == nil {
		client, err = fetch.New(rdb,
			fetch.WithTemplates(budget("team:", 20_000_000, monthly), budget("user:", 2_000_000, monthly)))
	}
	if err == nil {
		err = http.ListenAndServe("127.0.0.1:8080", newGateway(client, "127.0.0.1:8081", 15*time.Minute, hclog.Default()))
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// budget returns a template that gives each key with the prefix a number of tokens in each period.
func budget(prefix string, tokens int64, period policy.Steps) policy.Template {
	return policy.Template{Prefix: prefix, Policy: policy.Policy{Capacity: tokens, Steps: period, StepTokens: tokens}}
}

// gateway is a reverse proxy that charges the budgets for the tokens of the requests that it forwards.
type gateway struct {
	client  *fetch.Client
	proxy   *httputil.ReverseProxy
	longest time.Duration // limit of a request; a reservation that isn't settled by then is returned, as after a crash
	log     hclog.Logger
}

func newGateway(client *fetch.Client, upstream string, longest time.Duration, log hclog.Logger) *gateway {
	g := &gateway{client: client, longest: longest, log: log}
	g.proxy = &httputil.ReverseProxy{
		FlushInterval: -1, // events are forwarded as they come
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
			c, used := chargeOf(r.Context()), int64(0) // the model has not generated any tokens
			if r.Context().Err() != nil {
				used = c.prompt // the client has disconnected, but the model may have read the prompt
			}
			c.settle(used)
			log.Warn("upstream failed", "error", err)
			refuse(w, http.StatusBadGateway, "upstream_failed", "the model can't be reached")
		},
	}
	return g
}

// ServeHTTP reserves an estimate and forwards the request. The meter settles the reservations.
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
	prompt := int64(len(body)+3) / 4 // a rough estimate: four bytes are a token
	c := &charge{gateway: g, prompt: prompt, estimate: prompt + ask.MaxTokens, ctx: context.WithoutCancel(r.Context())}
	ctx, cancel := context.WithTimeout(r.Context(), g.longest)
	defer cancel()
	denied, err := c.reserve(ctx, "team:"+team, "user:"+team+"/"+user)
	switch {
	case err != nil:
		g.log.Warn("no decision", "error", err)
		o := limit.OutcomeOf(err)
		refuse(w, o.HTTP, o.Code, "no decision about the tokens")
	case denied != nil:
		w.Header().Set("Retry-After", strconv.Itoa(int(denied.RetryAfter.Seconds())+1))
		refuse(w, http.StatusTooManyRequests, "rate_limit_exceeded", denied.Key+" has too few tokens")
	default:
		r.Body = io.NopCloser(bytes.NewReader(body))
		g.proxy.ServeHTTP(w, r.WithContext(context.WithValue(ctx, chargeKey{}, c)))
	}
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"code": code, "message": message}})
}
