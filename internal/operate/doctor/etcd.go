package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// usualQuota is the limit of etcd's database in bytes, unless etcd reports another one.
	usualQuota = 2 << 30
	// manyWrites is a number of writes that does no harm. After so many writes, an etcd that compacts itself has removed
	// the first revisions.
	manyWrites = 10_000
	// etcdTimeout bounds each examination.
	etcdTimeout = 2 * time.Second
)

// EtcdEndpoints checks which endpoints of an etcd answer. alive is the first of them that answers.
func EtcdEndpoints(ctx context.Context, client *clientv3.Client, endpoints []string) (f Finding, alive string) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	answers := make([]error, len(endpoints))
	var wg sync.WaitGroup
	for i, endpoint := range endpoints {
		wg.Go(func() { _, answers[i] = client.Status(ctx, endpoint) })
	}
	wg.Wait()
	f = Finding{Check: "etcd endpoints", Level: OK}
	var silent []string
	for i, err := range answers {
		if err != nil {
			silent = append(silent, endpoints[i])
		} else if alive == "" {
			alive = endpoints[i]
		}
	}
	f.Detail = fmt.Sprintf("%d of %d answer", len(endpoints)-len(silent), len(endpoints))
	if len(silent) > 0 {
		f.Level, f.Detail = Warning, f.Detail+"; no reply from "+strings.Join(silent, ", ")
		f.Advice = "repair or remove these members: without a majority of them, no replica is elected, and no share changes"
	}
	return f, alive
}

// EtcdSpace checks how much space etcd has left. Without space etcd accepts no writes. Then shares of pools can't move,
// grants end, and every region falls to its floor.
func EtcdSpace(ctx context.Context, client *clientv3.Client, endpoint string) Finding {
	f := Finding{Check: "etcd has space", Level: Unknown}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	alarms, err := client.AlarmList(ctx)
	if err == nil && len(alarms.Alarms) > 0 {
		f.Level, f.Detail = Failure, fmt.Sprintf("alarm %s is raised: nothing can be written", alarms.Alarms[0].Alarm)
		f.Advice = "compact and defragment etcd (etcdctl compact, etcdctl defrag), and then run etcdctl alarm disarm"
		return f
	}
	status, errStatus := client.Status(ctx, endpoint)
	err = errors.Join(err, errStatus)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	quota := status.DbSizeQuota
	if quota == 0 {
		quota = usualQuota
	}
	f.Level, f.Detail = OK, fmt.Sprintf("%d of %d MiB are used", status.DbSize>>20, quota>>20)
	if status.DbSize > quota*3/4 {
		f.Level, f.Advice = Warning, "turn on auto-compaction and defragment etcd: without space it accepts no writes"
	}
	return f
}

// EtcdCompaction checks whether etcd removes the old values of its keys. If it does, the first revisions can't be read
// any more after many writes.
func EtcdCompaction(ctx context.Context, client *clientv3.Client, prefix string) Finding {
	f := Finding{Check: "etcd compacts itself", Level: Unknown}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	now, err := client.Get(ctx, prefix, clientv3.WithCountOnly())
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.Detail = "etcd has had too few writes to find out"
	if now.Header.Revision < manyWrites {
		return f
	}
	_, err = client.Get(ctx, prefix, clientv3.WithCountOnly(), clientv3.WithRev(2))
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		f.Level, f.Detail = OK, "etcd has removed its oldest revisions"
	case err != nil:
		f.Detail = err.Error()
	default:
		f.Level, f.Detail = Warning, fmt.Sprintf("etcd has removed none of its %d revisions: its space will run out",
			now.Header.Revision)
		f.Advice = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=10m"
	}
	return f
}
