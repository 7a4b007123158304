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
	maxWatch    = 5 * time.Second // how long a watch lasts before the key is read again
)

// Key keeps a copy of the value of one key of etcd and reports its changes. Value may be called concurrently with the
// other methods.
//
// A deletion is ignored: the copy keeps the last value. It also keeps the last value while etcd does not answer. A
// change in that time is reported afterwards.
//
// After etcd was restored or emptied, its revisions begin at an earlier number. A watch from a later revision then
// delivers no changes. So the key is also read every 5 s (maxWatch).
type Key struct {
	client *clientv3.Client
	name   string
	log    hclog.Logger

	mu    sync.Mutex
	value []byte
}

// NewKey makes a Key whose value is not known yet. It never closes the client.
func NewKey(client *clientv3.Client, name string, log hclog.Logger) *Key {
	return &Key{client: client, name: name, log: log}
}

// Name returns the name of the key in etcd.
func (k *Key) Name() string { return k.name }

// Value returns the value that was last read; nil if it is not known or never existed. The caller must not change it.
func (k *Key) Value() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.value
}

// Read reads the value. It must not be called while Run runs.
func (k *Key) Read(ctx context.Context) error {
	_, _, err := k.read(ctx)
	return err
}

// read reads the value. It reports whether the value has changed, and returns the revision at which it was read.
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

// set stores a value and reports whether it differs from the last one.
func (k *Key) set(value []byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if bytes.Equal(k.value, value) {
		return false
	}
	k.value = value
	return true
}

// Run follows the value and calls changed, in this goroutine, after each change. A change since the last Read counts,
// too. Run returns when ctx ends.
func (k *Key) Run(ctx context.Context, changed func()) {
	reading := true // of several failures in a row only the first is logged
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

// follow calls changed for changes from a revision on. It returns true when the watch has lasted for maxWatch, and
// false if the watch has failed before.
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
