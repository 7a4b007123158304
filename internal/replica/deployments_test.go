package replica_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// syncedText collects a log.
type syncedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *syncedText) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *syncedText) count(part string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.text.String(), part)
}

// Only one set of templates can be published in a Redis database. So two deployments with templates need a database
// each, even if the prefixes of their templates differ. The deployment whose templates are replaced or refused logs
// this once. Both deployments refill their configured buckets.
func TestOfTwoDeploymentsOnOneRedisOnePublishesItsTemplates(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	file := func(version int64, name, prefix string) config.Config {
		return parse(t, server.URL(), version, fmt.Sprintf("  - {key: %s, capacity: 1000, rate: 500/s}\n"+
			"templates: [{prefix: %q, capacity: 100, rate: 10/s}]\n", name, prefix))
	}
	var log syncedText
	logged := replica.Options{Logger: hclog.New(&hclog.LoggerOptions{Output: &log})}
	running(t, file(7, "a", "a:"), logged)
	c := consumer(t, server.Client(), fetch.WithRescue(false))
	taken := func(key string) func() bool {
		return func() bool {
			r, err := c.Take(ctx, key, 1)
			return err == nil && r.OK
		}
	}
	eventually(t, "the first deployment's templates are published", taken("a:1"))

	running(t, file(8, "b", "b:"), replica.Options{})
	eventually(t, "the later version's templates are published", taken("b:1"))
	_, err := c.Take(ctx, "a:new", 1)
	require.ErrorIs(t, err, fetch.ErrUnknownBucket)
	const later = "this replica's config is old, or another deployment uses this Redis database"
	eventually(t, "the first deployment logs that its version is older", func() bool { return log.count(later) > 0 })
	for _, key := range []string{"a", "b"} {
		index := peek(t, server.Client(), key).Version.Index
		eventually(t, "both refill their own buckets", func() bool {
			return peek(t, server.Client(), key).Version.Index > index+15
		})
	}
	require.Equal(t, 1, log.count(later), "the replica logs this once, though it tries again")

	same := replica.Options{Logger: hclog.New(&hclog.LoggerOptions{Output: &log})}
	running(t, file(8, "c", "c:"), same)
	eventually(t, "a deployment of the same version gives way, too", func() bool {
		return log.count("other templates are published under this version and stay: raise the config's version, "+
			"unless another deployment uses this Redis database") == 1
	})
	require.True(t, taken("b:2")())
}

// A deployment whose file has no field for templates shares a Redis with one that has templates. It leaves the
// published set as it is, with the names of the other deployment's buckets.
func TestADeploymentWithoutTemplatesLeavesThoseOfAnother(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	first := running(t, parse(t, server.URL(), 7, oneBucket+"  - {key: \"user:1\", capacity: 10, rate: 10/s}\n"+
		"templates: [{prefix: \"user:\", capacity: 100, rate: 10/s}]\n"), replica.Options{})
	var before map[string]string
	read := func() map[string]string { return server.Client().HGetAll(ctx, lua.TemplatesKey).Val() }
	eventually(t, "the templates are published", func() bool {
		before = read()
		return len(before) > 0
	})
	second := running(t, parse(t, server.URL(), 100, "  - {key: b, capacity: 1000, rate: 500/s}\n"), replica.Options{})
	eventually(t, "the second deployment follows them", func() bool {
		return len(second.Status(ctx, admin.Query{}).Templates) == 1
	})
	require.Never(t, func() bool { return len(first.Status(ctx, admin.Query{}).Outdated.Templates) > 0 },
		1500*time.Millisecond, 50*time.Millisecond)
	require.Equal(t, before, read())
}
