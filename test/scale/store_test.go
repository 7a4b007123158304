package scale

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// store is the Redis that holds the buckets.
type store struct {
	rdb   redis.UniversalClient
	nodes []*redis.Client
	url   string
}

func startStore(t *testing.T, cluster bool) *store {
	t.Helper()
	s := &store{}
	if cluster {
		c := testenv.Cluster(t)
		s.rdb, s.url = c.Client(), c.URL()
		for _, node := range c.Nodes() {
			s.nodes = append(s.nodes, node.Client())
		}
	} else {
		server := testenv.Redis(t)
		s.rdb, s.url = server.Client(), server.URL()
		s.nodes = []*redis.Client{server.Client()}
	}
	require.NoError(t, lua.Load(t.Context(), s.rdb))
	return s
}

// usage is the resource usage of all servers together.
type usage struct{ cpu, memory, commands float64 }

func (s *store) usage(t *testing.T) (u usage) {
	t.Helper()
	for _, node := range s.nodes {
		info, err := node.InfoMap(t.Context(), "cpu", "memory", "stats").Result()
		require.NoError(t, err)
		number := func(section, field string) float64 {
			v, err := strconv.ParseFloat(info[section][field], 64)
			require.NoError(t, err, field)
			return v
		}
		u.cpu += number("CPU", "used_cpu_user") + number("CPU", "used_cpu_sys")
		u.memory += number("Memory", "used_memory")
		u.commands += number("Stats", "total_commands_processed")
	}
	return u
}

// template returns the template of a scenario's buckets.
func (s *store) template(sc scenario) *lua.Template {
	_, cluster := s.rdb.(*redis.ClusterClient)
	t := policy.Template{Prefix: prefix, Policy: policy.Policy{
		Capacity: capacity, Rate: policy.PerSecond(rate), Interval: sc.Interval,
	}}
	return lua.NewTemplate(&policy.CompiledTemplate{Template: t, Text: t.Terms(policy.Fence{Epoch: 1}).Encode()}, cluster)
}

// fill creates the template's buckets with first takes. The first sc.Active buckets are
// nearly empty, so that they stay active. The others have one token less than their capacity.
func (s *store) fill(t *testing.T, sc scenario) {
	t.Helper()
	const workers = 32
	template := s.template(sc)
	g, ctx := errgroup.WithContext(t.Context())
	for w := range workers {
		g.Go(func() error {
			for i := w; i < sc.Keys; i += workers {
				n := int64(1)
				if i < sc.Active {
					n = capacity * 9 / 10
				}
				if err := s.take(ctx, sc.key(i), template, n); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
}

// take takes n tokens from a template's bucket, as the SDK does.
func (s *store) take(ctx context.Context, key string, template *lua.Template, n int64) error {
	takes := lua.Takes{Key: key, Runs: []policy.Run{{N: n, Count: 1}}, Below: capacity, Template: template}
	for {
		replies, err := new(lua.TakesCall).Do(ctx, s.rdb, []lua.Takes{takes})
		if err != nil {
			return err
		}
		r := replies[0]
		if r.Missed {
			takes.Whole = true
			continue
		}
		if r.Err == nil && r.Till != 0 {
			r.Err = template.Enter(ctx, s.rdb, key, r.Till)
		}
		return r.Err
	}
}

// active returns the number of buckets in the active set, and the number of its shards that have a bucket.
func (s *store) active(t *testing.T) (n int64, shards int) {
	t.Helper()
	all := make([]lua.Shard, lua.ActiveShards)
	for i := range all {
		all[i] = lua.Shard{Prefix: prefix, Number: i}
	}
	for _, c := range lua.Counts(t.Context(), s.rdb, all) {
		require.NoError(t, c.Err)
		n += c.Count
		if c.Count > 0 {
			shards++
		}
	}
	return n, shards
}

// bucket is the state of a bucket.
type bucket struct {
	tokens int64
	last   time.Time // time of the last refill, on the clock of Redis
}

// read reads all buckets of a scenario, many in one call.
func (s *store) read(t *testing.T, sc scenario) []bucket {
	t.Helper()
	const atOnce = 1000
	buckets := make([]bucket, 0, sc.Keys)
	for from := 0; from < sc.Keys; from += atOnce {
		var tokens, states []*redis.StringCmd
		_, err := s.rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for i := from; i < min(from+atOnce, sc.Keys); i++ {
				tokens = append(tokens, p.Get(t.Context(), lua.TokensKey(sc.key(i))))
				states = append(states, p.HGet(t.Context(), lua.ControlKey(sc.key(i)), "st"))
			}
			return nil
		})
		require.NoError(t, err)
		for i := range tokens {
			n, err := tokens[i].Int64()
			require.NoError(t, err)
			var era, last int64
			_, err = fmt.Sscan(states[i].Val(), &era, &last)
			require.NoError(t, err)
			buckets = append(buckets, bucket{n, time.UnixMicro(last)})
		}
	}
	return buckets
}
