package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrNotFenced is returned by Lift for a region that isn't fenced.
var ErrNotFenced = errors.New("pool: region is not fenced")

// ErrFenced is returned by Fence if it should drain a region that is fenced already. The other regions have the part of
// a fenced region, so it can't be drained before the fence is lifted.
var ErrFenced = errors.New("pool: region is fenced: lift the fence before you drain it")

// Fencing is an operator's declaration that a region uses nothing of any pool, or that it must use nothing.
type Fencing struct {
	Operator string    `json:"operator"`
	Reason   string    `json:"reason,omitempty"`
	At       time.Time `json:"at"`
	// Drain makes the region give up its share and its floor. These count against the pool until the region has
	// acknowledged the drain.
	Drain bool `json:"drain,omitempty"`
}

// declared is an operator's declaration about a region.
type declared int

const (
	inUse    declared = iota
	draining          // it must use nothing; its share counts until it has acknowledged that
	fenced            // it uses nothing, so none of its offers counts
)

func decodeFencing(text string) (f Fencing, err error) {
	err = json.Unmarshal([]byte(text), &f)
	if err != nil {
		err = fmt.Errorf("%w: fence: %w", ErrRecord, err)
	}
	return f, err
}

func (f Fencing) declared() declared {
	if f.Drain {
		return draining
	}
	return fenced
}

// Fence declares that a region uses nothing of any pool below the prefix, until Lift.
//
// The other regions get the region's shares at once, even its floors. Fence a region only if its Redis is lost. If its
// consumers still take tokens, the pools' rates are exceeded by up to these shares.
//
// With f.Drain the region is ordered to use nothing, and its consumers are denied. If the region reaches etcd, it
// acknowledges the order. Only then do the other regions get its shares, so no rate is exceeded. RegionStatus.Idle
// reports whether the region has acknowledged.
func Fence(ctx context.Context, client *clientv3.Client, prefix, region string, f Fencing) error {
	if !validName(region) {
		return fmt.Errorf("%w: region %q: want 1 to %d letters, digits and any of . _ : -", ErrPool, region, MaxName)
	}
	value, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("pool: fence: %w", err)
	}
	r := newEtcdRegistry(client, prefix)
	if !f.Drain {
		_, err = r.put(ctx, fenceKeys+region, string(value))
		return err
	}
	entries, _, err := r.load(ctx, fenceKeys+region)
	if err != nil {
		return err
	}
	w := write{key: fenceKeys + region, value: string(value)}
	if len(entries) > 0 {
		if old, err := decodeFencing(entries[0].value); err != nil || !old.Drain {
			return errors.Join(fmt.Errorf("%w: %q", ErrFenced, region), err)
		}
		w.seen = entries[0].revision
	}
	return r.swap(ctx, w, fmt.Errorf("%w: %q has just changed", ErrFenced, region))
}

// Lift ends a fence or a drain. The region gets its floor and a share as soon as these rates are free.
func Lift(ctx context.Context, client *clientv3.Client, prefix, region string) error {
	r := newEtcdRegistry(client, prefix)
	entries, _, err := r.load(ctx, fenceKeys+region)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("%w: %q", ErrNotFenced, region)
	}
	return r.swap(ctx, write{key: fenceKeys + region, seen: entries[0].revision, remove: true},
		fmt.Errorf("%w: %q has just changed", ErrNotFenced, region))
}

// swap makes one write, and returns changed if its key was modified since it was read.
func (r *etcdRegistry) swap(ctx context.Context, w write, changed error) error {
	_, err := r.commit(ctx, leadership{}, []write{w})
	if errors.Is(err, errConflict) {
		return changed
	}
	return err
}
