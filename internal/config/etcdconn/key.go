package etcdconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/timing"
)

const (
	readTimeout = 2 * time.Second
	retryPause  = time.Second
	maxWatch    = 5 * time.Second // how long a watch is trusted to be of the etcd that was read
)

// Key keeps the value of one key of etcd at hand and reports when it has changed. Value is safe for concurrent use with
// the others.
//
// A deletion is ignored: the value that was read last stays. While etcd does not answer it stays too, and a change in
// the meantime is reported afterwards.
//
// An etcd that was restored or emptied counts revisions from an earlier one, and a watch from a later one delivers
// nothing of what is written there. So the key is also read every 5 s (maxWatch).
type Key struct {
	client *clientv3.Client
	name   string
	log    hclog.Logger

	mu    sync.Mutex
	value []byte
}

// NewKey makes a Key whose value is not known yet. The client stays the caller's.
func NewKey(client *clientv3.Client, name string, log hclog.Logger) *Key {
	return &Key{client: client, name: name, log: log}
}

// Name is the key's name.
func (k *Key) Name() string { return k.name }

// Value is the value as it was last seen; nil if it is not known or was never there. It is not to be changed.
func (k *Key) Value() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.value
}

// Read reads the value. It is not called while Run runs.
func (k *Key) Read(ctx context.Context) error {
	_, _, err := k.read(ctx)
	return err
}

// read reads the value, and returns whether it has changed and the revision of the reading.
func (k *Key) read(ctx context.Context) (changed bool, revision int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	resp, err := k.client.Get(ctx, k.name)
	if err != nil {
		return false, 0, fmt.Errorf("etcdconn: read %s: %w", k.name, err)
	}
	for _, kv := range resp.Kvs {
		changed = k.set(kv.Value)
	}
	return changed, resp.Header.Revision, nil
}

// set keeps a value and reports whether it is another one.
func (k *Key) set(value []byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if bytes.Equal(k.value, value) {
		return false
	}
	k.value = value
	return true
}

// Run calls changed, from this goroutine, after each change of the value since it was last read, until ctx ends.
func (k *Key) Run(ctx context.Context, changed func()) {
	reading := true // the first failure of several is worth a line
	for {
		another, revision, err := k.read(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			reading = true
			if another {
				changed()
			}
			if k.follow(ctx, revision+1, changed) {
				continue
			}
		case reading:
			reading = false
			k.log.Warn("shared config can't be read: what was read last counts", "key", k.name, "error", err)
		}
		if !timing.Sleep(ctx.Done(), retryPause) {
			return
		}
	}
}

// follow reports changes from a revision on until the watch has lasted for maxWatch, or ends before: then it is not
// whole.
func (k *Key) follow(ctx context.Context, revision int64, changed func()) (whole bool) {
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), maxWatch)
	defer cancel()
	for resp := range k.client.Watch(ctx, k.name, clientv3.WithRev(revision)) {
		another := false
		for _, e := range resp.Events {
			switch e.Type {
			case clientv3.EventTypePut:
				another = k.set(e.Kv.Value) || another
			case clientv3.EventTypeDelete:
				k.log.Warn("shared config was deleted: what was read last counts", "key", k.name)
			}
		}
		if another {
			changed()
		}
	}
	return errors.Is(ctx.Err(), context.DeadlineExceeded)
}
