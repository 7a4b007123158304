package pool

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// narrow relays connections to a server, at most perSecond bytes per second each way. It returns its own address.
func narrow(t *testing.T, server string, perSecond int) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	t.Cleanup(func() { // its clients are closed
		_ = listener.Close()
		wg.Wait()
	})
	copyTo := func(dst, src net.Conn) {
		defer dst.Close()
		defer src.Close()
		free := time.Now() // when the line can send the next block
		for block := make([]byte, 16<<10); ; {
			n, err := src.Read(block)
			if now := time.Now(); free.Before(now) {
				free = now
			}
			free = free.Add(time.Duration(n) * time.Second / time.Duration(perSecond))
			time.Sleep(time.Until(free))
			if _, failed := dst.Write(block[:n]); err != nil || failed != nil {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", server)
			if err != nil {
				_ = client.Close()
				continue
			}
			wg.Go(func() { copyTo(to, client) })
			wg.Go(func() { copyTo(client, to) })
		}
	})
	return listener.Addr().String()
}

// manyPools returns the records of many pools, by key.
func manyPools(pools, regions int) map[string]string {
	settings := Settings{Version: 1}
	for i := range pools {
		p := Pool{Name: fmt.Sprint("pool", i), Rate: policy.PerSecond(10_000), Capacity: 500_000}
		for r := range regions {
			p.Regions = append(p.Regions, Region{Name: fmt.Sprint("region", r), Weight: 1, since: 1})
		}
		settings.Pools = append(settings.Pools, p)
	}
	l := newLedger("")
	l.configure(&settings.Pools[0])
	keys, now := map[string]string{configKey: settings.record(), epochKey: "5"}, time.Now().UnixMicro()
	for r := range regions {
		s, rep := share{12 * time.Second, map[string]grants{}}, report{agent: "a", tickets: map[string]ticket{}}
		for i, p := range settings.Pools {
			terms := l.terms(int64(400_000/regions+i*37+r*101), 10_000, 25_000)
			terms.Fence = policy.Fence{Epoch: 5, Seq: int64(i*regions + r + 1)}
			terms.GrantEnd, terms.GrantEra = now+12e6, now-1e9
			older := terms
			older.Fence.Seq--
			older.GrantTokens += int64(i * 13 % 997)
			s.pools[p.Name] = grants{terms: []policy.Terms{terms, older},
				demand: int64(300_000 + i*7919%100_000), since: 1, joined: true, open: true}
			t := ticket{now: now, era: now - 1e9, kind: pooled, tokens: int64(i*7919) % 25_000, added: int64(i) * 1e6,
				denied: int64(i), terms: terms}
			t.terms.Interval, t.terms.MaxElapsed = 0, 0
			rep.tickets[p.Name] = t
		}
		keys[shareKeys+fmt.Sprint("region", r)], keys[reportKeys+fmt.Sprint("region", r)] = s.encode(), rep.encode()
	}
	return keys
}

// A coordinator takes over 1000 pools of 20 regions over a line of 20 Mbit/s with 80 ms there and back.
func TestACoordinatorTakesOverOverANarrowLine(t *testing.T) {
	etcd := testenv.Etcd(t, 1)
	near := etcd.Client()
	keys := manyPools(1000, 20)
	size := 0
	for k, v := range keys {
		size += len(v)
		_, err := near.Put(t.Context(), testPrefix+"/"+k, v)
		require.NoError(t, err)
	}
	lead, err := near.Put(t.Context(), testPrefix+"/"+leaderKeys+"x", "x")
	require.NoError(t, err)
	proxy := testenv.Proxy(t, etcd.Members()[0].Addr(), 0)
	require.NoError(t, proxy.Delay(faultproxy.Both, 40*time.Millisecond, 0))
	client, err := etcdconn.Open(etcdconn.Options{Endpoints: []string{narrow(t, proxy.Addr(), 20_000_000/8)}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	_, err = client.Get(t.Context(), "x") // connect the client
	require.NoError(t, err)
	c, err := NewCoordinator(CoordinatorConfig{Client: client, Prefix: testPrefix, Timing: DefaultTiming(),
		Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var leading sync.WaitGroup
	stop := func() {
		cancel()
		leading.Wait()
	}
	defer stop()
	terms := 0 // the number of terms: a busy machine may need more than one
	began := time.Now()
	leading.Go(func() {
		for ; ctx.Err() == nil; terms++ {
			err := c.Lead(ctx, election.Term{Key: testPrefix + "/" + leaderKeys + "x", Epoch: lead.Header.Revision})
			t.Logf("a term ends: %v", err)
		}
	})
	for round := int64(1); c.Stats().Writes < 20; round++ { // each region reports once a period
		require.Less(t, time.Since(began), 5*time.Minute, "%+v", c.Stats())
		for region := range 20 {
			key := reportKeys + fmt.Sprint("region", region)
			r, err := decodeReport(keys[key])
			require.NoError(t, err)
			for name, t := range r.tickets {
				t.now += round * 1e6
				t.added += round * 5000
				r.tickets[name] = t
			}
			_, err = near.Put(t.Context(), testPrefix+"/"+key, r.encode())
			require.NoError(t, err)
		}
		for until := time.Now().Add(time.Second); c.Stats().Writes < 20 && time.Now().Before(until); {
			time.Sleep(5 * time.Millisecond)
		}
	}
	written := time.Since(began)
	stop()
	t.Logf("%.2f MB are read, and every share is renewed after %v in %d terms", float64(size)/1e6, written, terms)
	require.Zero(t, c.Stats().Unread)
}
