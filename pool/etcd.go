package pool

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

// etcdRegistry is a registry in etcd, below a prefix that ends with a slash.
type etcdRegistry struct {
	client *clientv3.Client
	prefix string
}

var _ registry = (*etcdRegistry)(nil)

func newEtcdRegistry(client *clientv3.Client, prefix string) *etcdRegistry {
	return &etcdRegistry{client: client, prefix: prefix + "/"}
}

func (r *etcdRegistry) load(ctx context.Context, keys ...string) ([]entry, int64, error) {
	gets := []clientv3.Op{clientv3.OpGet(r.prefix, clientv3.WithPrefix())}
	if len(keys) > 0 {
		gets = gets[:0]
		for _, k := range keys {
			gets = append(gets, clientv3.OpGet(r.prefix+k))
		}
	}
	resp, err := r.client.Txn(ctx).Then(gets...).Commit()
	if err != nil {
		return nil, 0, fmt.Errorf("pool: read %s: %w", r.prefix, err)
	}
	var entries []entry
	for _, part := range resp.Responses {
		for _, kv := range part.GetResponseRange().Kvs {
			if e := r.entry(string(kv.Key), string(kv.Value), kv.ModRevision); !strings.HasPrefix(e.key, leaderKeys) {
				entries = append(entries, e)
			}
		}
	}
	return entries, resp.Header.Revision, nil
}

func (r *etcdRegistry) entry(key, value string, revision int64) entry {
	return entry{key: strings.TrimPrefix(key, r.prefix), value: value, revision: revision}
}

func (r *etcdRegistry) watch(ctx context.Context, from int64, to chan<- entry, keys ...string) error {
	// WithRequireLeader makes the watch fail on a member of etcd that is cut off from the others. Otherwise the watch
	// would deliver nothing.
	g, ctx := errgroup.WithContext(clientv3.WithRequireLeader(ctx))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if len(keys) == 0 {
		g.Go(func() error { return r.follow(ctx, to, r.prefix, clientv3.WithRev(from), clientv3.WithPrefix()) })
	}
	for _, k := range keys {
		g.Go(func() error { return r.follow(ctx, to, r.prefix+k, clientv3.WithRev(from)) })
	}
	return g.Wait()
}

// follow sends the changes of one watch until the watch fails or ctx ends. It never returns nil.
func (r *etcdRegistry) follow(ctx context.Context, to chan<- entry, key string, opts ...clientv3.OpOption) error {
	for resp := range r.client.Watch(ctx, key, opts...) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("pool: watch %s: %w", key, err)
		}
		for _, event := range resp.Events {
			e := r.entry(string(event.Kv.Key), string(event.Kv.Value), event.Kv.ModRevision)
			e.deleted = event.Type == clientv3.EventTypeDelete
			if strings.HasPrefix(e.key, leaderKeys) {
				continue
			}
			if err := send(ctx, to, e); err != nil {
				return err
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.New("pool: watch " + key + ": the client is closed")
}

func (r *etcdRegistry) put(ctx context.Context, key, value string) (int64, error) {
	resp, err := r.client.Put(ctx, r.prefix+key, value)
	if err != nil {
		return 0, fmt.Errorf("pool: write %s: %w", r.prefix+key, err)
	}
	return resp.Header.Revision, nil
}

func (r *etcdRegistry) commit(ctx context.Context, l leadership, writes []write) (int64, error) {
	var guards []clientv3.Cmp
	var then, otherwise []clientv3.Op
	if l.key != "" {
		guards = append(guards, clientv3.Compare(clientv3.CreateRevision(l.key), "=", l.revision))
		otherwise = append(otherwise, clientv3.OpGet(l.key))
	}
	if l.epoch != 0 {
		guards = append(guards, clientv3.Compare(clientv3.Value(r.prefix+epochKey), "=", strconv.FormatInt(l.epoch, 10)))
	}
	for _, w := range writes {
		guards = append(guards, clientv3.Compare(clientv3.ModRevision(r.prefix+w.key), "=", w.seen))
		if w.remove {
			then = append(then, clientv3.OpDelete(r.prefix+w.key))
		} else {
			then = append(then, clientv3.OpPut(r.prefix+w.key, w.value))
		}
	}
	resp, err := r.client.Txn(ctx).If(guards...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return 0, fmt.Errorf("pool: write below %s: %w", r.prefix, err)
	}
	if resp.Succeeded {
		return resp.Header.Revision, nil
	}
	if l.key != "" {
		kvs := resp.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 || kvs[0].CreateRevision != l.revision {
			return 0, errDeposed
		}
	}
	return 0, errConflict
}
