package sidecar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
)

const (
	clientsOfEach = 32 // number of well-behaved clients, and of hostile ones
	phase         = 1500 * time.Millisecond
	thinkTime     = 40 * time.Millisecond // between a well-behaved client's calls
	hostilePause  = 50 * time.Millisecond
	wakeups       = 4 // of processes during a call
	// negligible is a p99 that the scheduler of a busy machine causes without the server.
	negligible = 10 * time.Millisecond
)

// Half of 64 clients are hostile. The other clients must get all their replies, and wait at most twice as long as
// without hostile clients. A busy machine also wakes processes up late, which is no fault of the server. This delays a
// call four times: in the sidecar, in Redis, in the sidecar again, and in the client. So the test subtracts this delay.
//
// The test compares with measurements without hostile clients, before and after. If the waits were too long, it
// measures again, because a fault of the server would appear each time.
func TestHostileClientsDoNotSlowOthersDown(t *testing.T) {
	const capacity = 1 << 30
	b := start(t, func(o *Options, _ *bench) {
		o.Limits.Patience = time.Second
		o.Limits.ClientCalls = 4
		o.Limits.Connections = 8
	})
	b.bucket("checkout", capacity)
	b.empty("empty", 10*time.Minute)
	callers := wellBehaved(t, b)

	var taken int64
	measure := func(while string) (p99, late time.Duration) {
		times, delays := callAll(t, callers)
		taken += int64(len(times))
		p99, late = times[len(times)*99/100], delays[len(delays)*99/100]
		t.Logf("%s: p99 %s of %d calls; woken %s late", while, p99, len(times), late)
		return p99, late
	}
	for try := 1; ; try++ {
		before, _ := measure("alone")
		stop := beHostile(t, b)
		beside, late := measure("beside hostile clients")
		stop()
		after, _ := measure("alone again")
		if beside-wakeups*late <= max(2*max(before, after), negligible) {
			break
		}
		require.Less(t, try, 4, "beside hostile clients the p99 is %s; alone %s and %s", beside, before, after)
	}
	b.underWay(0)
	require.Equal(t, capacity-taken, b.tokens("checkout"), "no other client has taken tokens")
}

// wellBehaved returns callers, each with a different address. Half of them use HTTP and half use gRPC. Each call takes
// a token.
func wellBehaved(t *testing.T, b *bench) []func(context.Context) error {
	var callers []func(context.Context) error
	for i := range clientsOfEach / 2 {
		web := from(t, fmt.Sprintf("127.0.1.%d", i+1))
		callers = append(callers, func(ctx context.Context) error {
			status, err := post(ctx, web, b.url("/v1/take"), strings.NewReader(`{"key":"checkout"}`))
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("status %d", status)
			}
			return err
		})
		buckets := refillerv1.NewBucketsClient(b.dial(dialFrom(fmt.Sprintf("127.0.2.%d", i+1))...))
		callers = append(callers, func(ctx context.Context) error {
			_, err := buckets.Take(ctx, &refillerv1.TakeRequest{Key: "checkout"})
			return err
		})
	}
	return callers
}

func dialFrom(ip string) []grpc.DialOption {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", addr)
		}),
	}
}

// post sends a body and reads the answer, and returns its status.
func post(ctx context.Context, c *http.Client, url string, body io.Reader) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

// callAll lets all callers call for a while. It returns the durations of the calls and the delays before them, both
// sorted.
func callAll(t *testing.T, callers []func(context.Context) error) (times, delays []time.Duration) {
	t.Helper()
	took, late := make([][]time.Duration, len(callers)), make([][]time.Duration, len(callers))
	end := time.Now().Add(phase)
	var calling sync.WaitGroup
	for i, call := range callers {
		calling.Go(func() {
			next := time.Now().Add(time.Duration(i) * thinkTime / clientsOfEach)
			for ; next.Before(end); next = time.Now().Add(thinkTime) {
				time.Sleep(time.Until(next))
				began := time.Now()
				late[i] = append(late[i], began.Sub(next))
				if err := call(t.Context()); err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				took[i] = append(took[i], time.Since(began))
			}
		})
	}
	calling.Wait()
	require.False(t, t.Failed(), "a well-behaved client was refused")
	return slices.Sorted(slices.Values(slices.Concat(took...))), slices.Sorted(slices.Values(slices.Concat(late...)))
}

// hostile is a client that tries to harm others.
type hostile struct {
	b      *bench
	dialer net.Dialer
	web    *http.Client
	grpc   refillerv1.BucketsClient
}

// beHostile starts hostile clients and returns stop, which ends them and checks that each kind of them reached the
// server.
func beHostile(t *testing.T, b *bench) (stop func()) {
	t.Helper()
	kinds := []struct {
		name  string
		act   func(*hostile, context.Context) error
		times int // number of goroutines that act
	}{
		{"slow", (*hostile).trickle, 8}, // twice as many as a client's calls that may run
		{"huge", (*hostile).sendTooMuch, 1}, {"malformed", (*hostile).sendNonsense, 1},
		{"impatient", (*hostile).giveUpSoon, 1},
	}
	ctx, cancel := context.WithCancel(t.Context())
	var acting sync.WaitGroup
	done := make([]atomic.Int64, len(kinds))
	for i := range clientsOfEach {
		kind, ip := kinds[i%len(kinds)], fmt.Sprintf("127.0.3.%d", i+1)
		h := &hostile{b: b, web: from(t, ip), grpc: refillerv1.NewBucketsClient(b.dial(dialFrom(ip)...))}
		h.dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(ip)}
		for range kind.times {
			acting.Go(func() {
				for ctx.Err() == nil {
					if err := kind.act(h, ctx); err != nil && ctx.Err() == nil {
						t.Errorf("%s client: %v", kind.name, err)
						return
					}
					done[i%len(kinds)].Add(1)
					select {
					case <-ctx.Done():
					case <-time.After(hostilePause):
					}
				}
			})
		}
	}
	return func() {
		cancel()
		acting.Wait()
		for i := range kinds {
			require.Positive(t, done[i].Load(), "%s clients did nothing", kinds[i].name)
		}
	}
}

// trickle sends a request byte by byte until the server replies or closes the connection.
func (h *hostile) trickle(ctx context.Context) error {
	return h.raw(ctx, h.b.server.HTTPAddrs()[0], func(c net.Conn) {
		text := "POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
		for _, err := io.WriteString(c, text); err == nil; _, err = io.WriteString(c, " ") {
			_ = c.SetReadDeadline(time.Now().Add(hostilePause))
			if _, err := c.Read(make([]byte, 512)); !errors.Is(err, os.ErrDeadlineExceeded) {
				return // it was answered or cut off
			}
		}
	})
}

// sendTooMuch sends a request that is too large. The server may close the connection before it has read all of it.
func (h *hostile) sendTooMuch(ctx context.Context) error {
	return h.refused(ctx, `{"key":"`+strings.Repeat("k", 256<<10)+`"}`)
}

// sendNonsense sends data that is no valid request, and data that is neither HTTP nor gRPC.
func (h *hostile) sendNonsense(ctx context.Context) error {
	err := h.refused(ctx, `{"key":"checkout","tokens":{}}`)
	for _, addr := range []net.Addr{h.b.server.HTTPAddrs()[0], h.b.server.GRPCAddrs()[0]} {
		if err == nil {
			err = h.raw(ctx, addr, func(c net.Conn) {
				_, _ = io.WriteString(c, strings.Repeat("\x00\xff nonsense", 100)+"\r\n\r\n") // it may be cut off
				_, _ = io.Copy(io.Discard, c)
			})
		}
	}
	return err
}

// refused sends a take that must not be admitted.
func (h *hostile) refused(ctx context.Context, body string) error {
	if status, err := post(ctx, h.web, h.b.url("/v1/take"), strings.NewReader(body)); err == nil && status < 400 {
		return fmt.Errorf("status %d", status)
	}
	return nil
}

// giveUpSoon waits for tokens that don't come, over HTTP and over gRPC, for 12 ms each.
func (h *hostile) giveUpSoon(ctx context.Context) error {
	within, cancel := context.WithTimeout(ctx, 12*time.Millisecond)
	_, _ = post(within, h.web, h.b.url("/v1/wait"), strings.NewReader(`{"key":"empty"}`))
	cancel()
	within, cancel = context.WithTimeout(ctx, 12*time.Millisecond)
	defer cancel()
	_, _ = h.grpc.Wait(within, &refillerv1.WaitRequest{Key: "empty"})
	return nil // the reply doesn't matter
}

// raw calls do with a connection, which is closed when ctx ends.
func (h *hostile) raw(ctx context.Context, to net.Addr, do func(net.Conn)) error {
	c, err := h.dialer.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	do(c)
	return nil
}
