package election

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdStore is the store of one elector in etcd.
type etcdStore struct {
	client *clientv3.Client
	leases pb.LeaseClient
	prefix string // of the keys, with the slash at its end

	// stream is the stream of renewals; nil when none is open. It is kept open because opening one needs another login.
	stream pb.Lease_LeaseKeepAliveClient
	hangUp context.CancelFunc
}

var _ store = (*etcdStore)(nil)

func newEtcdStore(client *clientv3.Client, prefix string) *etcdStore {
	return &etcdStore{client: client, leases: clientv3.RetryLeaseClient(client), prefix: prefix + "/lead/"}
}

func (s *etcdStore) grant(ctx context.Context, ttl time.Duration) (leaseID, time.Duration, error) {
	resp, err := s.client.Grant(ctx, int64(ttl/time.Second))
	if err != nil {
		return 0, 0, fmt.Errorf("election: grant lease: %w", err)
	}
	return leaseID(resp.ID), time.Duration(resp.TTL) * time.Second, nil
}

// renew doesn't use the client's KeepAliveOnce, which retries without a pause for as long as no endpoint answers. If
// the open stream fails, renew tries once more with a new stream. The connection or the login of the old stream may
// have ended.
func (s *etcdStore) renew(ctx context.Context, id leaseID) (time.Duration, error) {
	reused := s.stream != nil
	ttl, err := s.renewOnce(ctx, id)
	if err != nil && reused && !errors.Is(err, errLeaseGone) && ctx.Err() == nil {
		ttl, err = s.renewOnce(ctx, id)
	}
	return ttl, err
}

func (s *etcdStore) renewOnce(ctx context.Context, id leaseID) (time.Duration, error) {
	if s.stream == nil {
		if err := s.dialRenewals(ctx); err != nil {
			return 0, err
		}
	}
	// Hanging up unblocks Send and Recv. It also drops a late answer, which otherwise would count as the answer to a later
	// request.
	stop := context.AfterFunc(ctx, s.hangUp)
	err := s.stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(id)})
	var resp *pb.LeaseKeepAliveResponse
	if err == nil {
		resp, err = s.stream.Recv()
	}
	if !stop() || err != nil {
		s.endRenewals()
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return 0, fmt.Errorf("election: renew lease: %w", ctx.Err())
	case err != nil:
		return 0, fmt.Errorf("election: renew lease: %w", rpctypes.Error(err))
	case resp.TTL <= 0:
		return 0, errLeaseGone
	}
	return time.Duration(resp.TTL) * time.Second, nil
}

// dialRenewals opens the stream. ctx bounds the opening, and the stream outlives it.
func (s *etcdStore) dialRenewals(ctx context.Context) error {
	streamCtx, hangUp := context.WithCancel(clientv3.WithRequireLeader(context.WithoutCancel(ctx)))
	stop := context.AfterFunc(ctx, hangUp)
	stream, err := s.leases.LeaseKeepAlive(streamCtx)
	stop()
	if err != nil {
		hangUp()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("election: open stream of renewals: %w", rpctypes.Error(err))
	}
	s.stream, s.hangUp = stream, hangUp
	return nil
}

func (s *etcdStore) endRenewals() {
	if s.stream != nil {
		s.hangUp()
		s.stream, s.hangUp = nil, nil
	}
}

func (s *etcdStore) revoke(ctx context.Context, id leaseID) error {
	s.endRenewals()
	_, err := s.client.Revoke(ctx, clientv3.LeaseID(id))
	if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("election: revoke lease: %w", err)
	}
	return nil
}

func (s *etcdStore) enrol(ctx context.Context, id leaseID, identity string) (string, int64, error) {
	key := s.prefix + strconv.FormatInt(int64(id), 16)
	resp, err := s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, identity, clientv3.WithLease(clientv3.LeaseID(id)))).
		Commit()
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return key, 0, errLeaseGone
	case err != nil:
		return key, 0, fmt.Errorf("election: write key: %w", err)
	case !resp.Succeeded:
		return key, 0, fmt.Errorf("election: write key: %q exists already", key)
	}
	return key, resp.Header.Revision, nil
}

func (s *etcdStore) ahead(ctx context.Context, key string, epoch int64) (string, int64, error) {
	older := append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(epoch-1), clientv3.WithKeysOnly())
	resp, err := s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", epoch)).
		Then(clientv3.OpGet(s.prefix, older...)).
		Commit()
	if err != nil {
		return "", 0, fmt.Errorf("election: read keys: %w", err)
	}
	if !resp.Succeeded {
		return "", 0, errKeyGone
	}
	prev := ""
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		prev = string(kvs[0].Key)
	}
	return prev, resp.Header.Revision, nil
}

func (s *etcdStore) waitDeleted(ctx context.Context, key string, from int64) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	for resp := range s.client.Watch(ctx, key, clientv3.WithRev(from), clientv3.WithFilterPut()) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("election: watch key: %w", err)
		}
		if len(resp.Events) > 0 {
			return nil // puts are filtered out
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return errors.New("election: watch key: the client is closed")
}

func (s *etcdStore) remove(ctx context.Context, key string, epoch int64) error {
	_, err := s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", epoch)).
		Then(clientv3.OpDelete(key)).
		Commit()
	if err != nil {
		return fmt.Errorf("election: delete key: %w", err)
	}
	return nil
}

func (s *etcdStore) leader(ctx context.Context) (Leader, error) {
	resp, err := s.client.Get(ctx, s.prefix, clientv3.WithFirstCreate()...)
	if err != nil {
		return Leader{}, fmt.Errorf("election: read leader: %w", err)
	}
	if len(resp.Kvs) == 0 {
		return Leader{}, ErrNoLeader
	}
	return Leader{Identity: string(resp.Kvs[0].Value), Epoch: resp.Kvs[0].CreateRevision}, nil
}
