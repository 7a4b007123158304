package election

import (
	"context"
	"errors"
	"time"
)

var (
	// errLeaseGone is returned if the lease has ended or never existed.
	errLeaseGone = errors.New("election: the lease was lost")
	// errKeyGone is returned if the candidate's key was deleted or never existed.
	errKeyGone = errors.New("election: the key was removed")
)

// leaseID names a lease.
type leaseID int64

// store is the part of etcd that the elector uses. A key of an election is named after its lease. All calls return when
// their context ends. The elector never calls renew and revoke at the same time for one lease.
type store interface {
	// grant makes a lease and returns the TTL that the server granted.
	grant(ctx context.Context, ttl time.Duration) (leaseID, time.Duration, error)
	// renew starts the lease's TTL anew and returns it, or errLeaseGone.
	renew(ctx context.Context, id leaseID) (time.Duration, error)
	// revoke ends a lease and deletes its keys. A lease that has ended is no error. revoke also closes what renew opened.
	revoke(ctx context.Context, id leaseID) error

	// enrol writes the lease's key and returns its name and create revision.
	enrol(ctx context.Context, id leaseID, identity string) (key string, epoch int64, err error)
	// ahead returns the youngest key that is older than ours, or "" if there is none, and the revision at which it was
	// read. It returns errKeyGone if our own key doesn't exist.
	ahead(ctx context.Context, key string, epoch int64) (prev string, revision int64, err error)
	// waitDeleted waits until etcd reports a deletion of key at or after the revision from, and then returns nil.
	waitDeleted(ctx context.Context, key string, from int64) error
	// remove deletes the key if its create revision is epoch.
	remove(ctx context.Context, key string, epoch int64) error

	// leader returns the owner of the oldest key, or ErrNoLeader.
	leader(ctx context.Context) (Leader, error)
}
