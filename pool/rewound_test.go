package pool

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
)

// interleaved is a registry whose put calls meantime before it returns, so that more is read while a report is written.
type interleaved struct {
	registry
	revision int64 // the revision that the write makes
	meantime func()
}

func (r *interleaved) put(context.Context, string, string) (int64, error) {
	r.meantime()
	return r.revision, nil
}

func TestAWriteAtAnEarlierRevisionRevealsARestoredEtcd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, meantime, put int64
		rewound               bool
	}{
		"a later revision was read meanwhile":            {before: 1, meantime: 3, put: 2},
		"etcd is behind a revision that was read before": {before: 7, meantime: 7, put: 2, rewound: true},
		"the revision is that of an earlier read":        {before: 2, meantime: 2, put: 2, rewound: true},
	} {
		r := &interleaved{revision: c.put}
		a := newAgent(AgentConfig{Region: "eu", Logger: hclog.NewNullLogger(), Timing: ForTTL(2 * time.Second)}, r, nil, 1)
		a.revision = c.before
		r.meantime = func() { a.setState(func(*AgentState) { a.revision = c.meantime }) }
		a.put(t.Context(), report{})
		require.Len(t, a.rewound, map[bool]int{true: 1}[c.rewound], name)
	}
}

func (r *interleaved) commit(context.Context, leadership, []write) (int64, error) {
	return r.revision, nil
}

func TestASharesTransactionAtARevisionSeenBeforeItEndsTheSession(t *testing.T) {
	t.Parallel()
	for revision, want := range map[int64]error{6: errRewound, 7: errRewound, 8: nil} {
		c := newCoordinator(&interleaved{revision: revision}, DefaultTiming(), hclog.NewNullLogger())
		term := newTerm(c, leadership{revision: 5})
		term.revision = 7
		err := term.commit(t.Context(), term.leadership, []write{{key: shareKeys + "eu"}})
		require.ErrorIs(t, err, want, "at %d", revision)
	}
}

// An etcd that accepts connections and never answers is logged once, not at every attempt to read it.
func TestASilentEtcdIsReportedOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		var out strings.Builder
		w.log = hclog.New(&hclog.LoggerOptions{Output: &out, Mutex: new(sync.Mutex)})
		w.locked(func() { w.etcdDown = true })
		w.startProc("eu", "eu-logs")
		time.Sleep(2 * time.Minute)
		w.stopProcs("eu")
		time.Sleep(time.Second)
		require.Equal(t, 1, strings.Count(out.String(), "connection to etcd lost: grants last"), out.String())
	})
}
