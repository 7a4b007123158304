package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

const body = `{"max_tokens": 40, "messages": []}` // 34 bytes count as 9 tokens, so 49 tokens are reserved

// bench is a gateway in front of a model.
type bench struct {
	t       *testing.T
	rdb     *redis.Client
	client  *fetch.Client
	gateway *httptest.Server
}

// newClient makes a Client with 100 tokens a year for a team and 60 for a user.
func newClient(rdb *redis.Client) (*fetch.Client, error) {
	yearly, err := policy.ParseCalendar("0 0 1 1 *", time.UTC)
	if err != nil {
		return nil, err
	}
	return fetch.New(rdb, fetch.WithTimeout(10*time.Second),
		fetch.WithTemplates(budget("team:", 100, yearly), budget("user:", 60, yearly)))
}

func start(t *testing.T, model http.Handler) *bench {
	rdb := testenv.Redis(t).Client()
	client, err := newClient(rdb)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close(context.Background())) })
	upstream := httptest.NewServer(model)
	t.Cleanup(upstream.Close)
	g := newGateway(client, strings.TrimPrefix(upstream.URL, "http://"), time.Minute, hclog.NewNullLogger())
	gateway := httptest.NewServer(g)
	t.Cleanup(gateway.Close)
	return &bench{t, rdb, client, gateway}
}

// ask sends a request of a user of the team red.
func (b *bench) ask(ctx context.Context, user, body string) *http.Response {
	b.t.Helper()
	url := b.gateway.URL + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(b.t, err)
	req.Header.Set("X-Team", "red")
	req.Header.Set("X-User", user)
	res, err := b.gateway.Client().Do(req)
	require.NoError(b.t, err)
	return res
}

// left waits until the team and the user have so many tokens.
func (b *bench) left(user string, team, own int64) {
	b.t.Helper()
	var got [2]int64
	require.Eventually(b.t, func() bool {
		for i, key := range []string{"team:red", "user:red/" + user} {
			r, err := b.client.Peek(b.t.Context(), key)
			require.NoError(b.t, err)
			got[i] = r.Remaining
		}
		return got == [2]int64{team, own}
	}, 10*time.Second, time.Millisecond, "team and user: want %d and %d", team, own)
}

func atOnce(context.Context, int) error { return nil }

func TestAStreamThatEndsIsChargedWhatTheModelCounts(t *testing.T) {
	b := start(t, fakeLLM{pace: atOnce})
	res := b.ask(t.Context(), "ann", body)
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Equal(t, 20, strings.Count(string(text), "word"))
	require.Contains(t, string(text), "[DONE]")
	b.left("ann", 100-27, 60-27) // 20 words, and 7 tokens that the model counts for the prompt
}

func TestAClientThatGoesAwayIsChargedWhatItGot(t *testing.T) {
	ended := make(chan error, 1)
	b := start(t, fakeLLM{pace: func(ctx context.Context, i int) error {
		if i < 3 {
			return nil
		}
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	res := b.ask(ctx, "ann", body)
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for got := 0; got < 3; {
		require.True(t, lines.Scan())
		if strings.HasPrefix(lines.Text(), "data:") {
			got++
		}
	}
	b.left("ann", 100-49, 60-49)
	cancel()
	require.Error(t, <-ended, "the model stops, too")
	b.left("ann", 100-12, 60-12) // 3 words, and 9 tokens that the gateway estimates for the prompt
}

func TestAClientThatGoesAwayBeforeTheFirstByteIsChargedItsPrompt(t *testing.T) {
	reached := make(chan struct{}, 1)
	b := start(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		reached <- struct{}{}
		<-r.Context().Done()
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.gateway.URL+"/v1/chat/completions",
			strings.NewReader(body))
		if err == nil {
			req.Header.Set("X-Team", "red")
			req.Header.Set("X-User", "ann")
			var res *http.Response
			res, err = b.gateway.Client().Do(req)
			if err == nil {
				_ = res.Body.Close()
			}
		}
		ended <- err
	}()
	<-reached
	b.left("ann", 100-49, 60-49)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	b.left("ann", 100-9, 60-9)
}

func TestATeamWithoutTokensIsDeniedAndNoBucketIsCharged(t *testing.T) {
	asked := 0
	b := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		fakeLLM{pace: atOnce}.ServeHTTP(w, r)
	}))
	_, err := b.client.Take(t.Context(), "team:red", 52)
	require.NoError(t, err)
	res := b.ask(t.Context(), "ben", body)
	defer res.Body.Close()
	require.Equal(t, http.StatusTooManyRequests, res.StatusCode)
	wait, err := strconv.Atoi(res.Header.Get("Retry-After"))
	require.NoError(t, err)
	now := time.Now()
	require.InDelta(t, time.Date(now.UTC().Year()+1, 1, 1, 0, 0, 0, 0, time.UTC).Sub(now).Seconds(), wait, 60)
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), "team:red has too few tokens")
	require.Zero(t, asked)
	b.left("ben", 48, 60)
}

func TestMoreThanTheEstimateIsTakenAndOwed(t *testing.T) {
	b := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"choices": [{}], "usage": {"total_tokens": 70}}`) // an answer that isn't a stream
	}))
	res := b.ask(t.Context(), "ann", body)
	require.NoError(t, res.Body.Close())
	b.left("ann", 30, 0) // the user also owes 10 tokens, which the next year's budget pays
}

// The user's budget denies after the team's tokens were reserved. That reservation is undone.
func TestADenialOfTheUserUndoesTheTeamsReservation(t *testing.T) {
	b := start(t, fakeLLM{pace: atOnce})
	_, err := b.client.Take(t.Context(), "user:red/ann", 12)
	require.NoError(t, err)
	res := b.ask(t.Context(), "ann", body)
	defer res.Body.Close()
	require.Equal(t, http.StatusTooManyRequests, res.StatusCode)
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), "user:red/ann has too few tokens")
	b.left("ann", 100, 48)
}

// A thousand streams ask for tokens at the same time, but the budget is enough for one stream only.
func TestStreamsAtOnceDoNotOverrunABudget(t *testing.T) {
	const streams = 1000
	release := make(chan struct{})
	var reached, denied atomic.Int64
	b := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reached.Add(1)
		<-release
		_, _ = io.WriteString(w, `{"choices": [{}], "usage": {"total_tokens": 55}}`) // 6 beyond the estimate
	}))
	var asked sync.WaitGroup
	for range streams {
		asked.Go(func() {
			res := b.ask(t.Context(), "ann", body)
			defer res.Body.Close()
			if res.StatusCode == http.StatusTooManyRequests && denied.Add(1) == streams-1 {
				close(release)
			}
			_, _ = io.Copy(io.Discard, res.Body)
		})
	}
	asked.Wait()
	require.EqualValues(t, 1, reached.Load())
	b.left("ann", 100-55, 60-55)
}

// killed is an environment variable with the address of Redis. A process with this variable reserves tokens and is then
// killed.
const killed = "LLM_GATEWAY_TEST_REDIS"

func TestMain(m *testing.M) {
	if addr := os.Getenv(killed); addr != "" {
		reserveAndWait(addr)
	}
	os.Exit(m.Run())
}

// reserveAndWait reserves tokens in both budgets, prints a line, and waits to be killed.
func reserveAndWait(addr string) {
	client, err := newClient(redis.NewClient(&redis.Options{Addr: addr}))
	if err != nil {
		panic(err)
	}
	c := &charge{gateway: &gateway{client: client, longest: 2 * time.Second, log: hclog.Default()}, estimate: 49,
		ctx: context.Background()}
	if denied, err := c.reserve(c.ctx, "team:red", "user:red/ann"); err != nil || denied != nil {
		panic(fmt.Sprint(denied, err))
	}
	fmt.Println("reserved")
	select {}
}

// The gateway is killed while a stream is under way. When the time of its reservations is over, the reserved tokens are
// returned, and no more than these.
func TestTheReservationsOfAKilledGatewayEnd(t *testing.T) {
	b := start(t, fakeLLM{pace: atOnce})
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), killed+"="+b.rdb.Options().Addr)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "reserved\n", line)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	for key, all := range map[string]int64{"team:red": 100, "user:red/ann": 60} {
		require.Eventually(t, func() bool {
			r, err := b.client.Take(t.Context(), key, all)
			require.NoError(t, err)
			return r.OK
		}, 10*time.Second, 50*time.Millisecond, key)
		r, err := b.client.Take(t.Context(), key, 1)
		require.NoError(t, err)
		require.False(t, r.OK, "%s has more tokens than its capacity", key)
	}
}

func TestAModelThatFailsCostsNothing(t *testing.T) {
	for name, model := range map[string]http.HandlerFunc{
		"the model is busy":  func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
		"the model hangs up": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			b := start(t, model)
			res := b.ask(t.Context(), "ann", body)
			require.NoError(t, res.Body.Close())
			require.GreaterOrEqual(t, res.StatusCode, 500)
			b.left("ann", 100, 60)
		})
	}
}

func TestABadRequestIsRefused(t *testing.T) {
	b := start(t, fakeLLM{pace: atOnce})
	for _, bad := range []string{"", "{", `{"max_tokens": 0}`, `{"max_tokens": 10000000}`} {
		res := b.ask(t.Context(), "ann", bad)
		require.NoError(t, res.Body.Close())
		require.Equal(t, http.StatusBadRequest, res.StatusCode, bad)
	}
	res := b.ask(t.Context(), "ann", `{"max_tokens": 90}`)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusUnprocessableEntity, res.StatusCode, "the request needs more than a user's capacity")
	b.left("ann", 100, 60)
}
