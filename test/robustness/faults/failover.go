package faults

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// takeOver is how long a replica may take to become the master.
const takeOver = time.Minute

// failOverToLagging cuts the replica of a Sentinel from its master. When the fault is healed, the master is killed, and
// the replica becomes the master without the latest updates.
func failOverToLagging(e *env) func() {
	e.what.Effect = record.Rollback
	next := e.Sentinel.Replica()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	// From here on the replica gets no updates of the master.
	e.must(next.Client().ReplicaOf(ctx, "127.0.0.1", "1").Err())
	return func() {
		old := e.Sentinel.KillMaster()
		e.promoted(next)
		old.Restart()
	}
}

// failOverFromFrozen pauses the master of a Sentinel. The replica becomes the master without the updates that were
// under way. The former master is killed before it is resumed, because two masters at once would be two buckets.
func failOverFromFrozen(e *env) func() {
	e.what.Effect = record.Rollback
	next := e.Sentinel.Replica()
	old := e.Sentinel.FreezeMaster()
	return func() {
		e.promoted(next)
		old.Kill()
		old.Restart()
	}
}

// promoted waits until the sentinel has made a server the master.
func (e *env) promoted(next *testenv.RedisServer) {
	e.what.Gone = time.Now().UnixNano()
	ctx, cancel := context.WithTimeout(context.Background(), takeOver)
	defer cancel()
	e.must(e.Sentinel.WaitMaster(ctx, next))
	e.what.End = time.Now().UnixNano()
}

// stopMaster calls stop for the master of one of the buckets. The master's replica becomes the master without the
// updates that were under way. So this is a rollback of all buckets of the former master. When the fault is healed, the
// former master is killed and started again, and becomes a replica.
func (e *env) stopMaster(stop func(*testenv.RedisServer)) func() {
	slot := lua.Slot(e.Buckets[e.rng.IntN(len(e.Buckets))].Key)
	old := e.Cluster.Master(slot)
	if old == nil {
		e.T.Errorf("fault %s: no master of slot %d", e.what.Name, slot)
		return func() {}
	}
	for _, b := range e.Buckets {
		if e.Cluster.Master(lua.Slot(b.Key)) == old {
			e.moreRecords = append(e.moreRecords, &record.Fault{Name: e.what.Name, Start: e.what.Start, Effect: record.Rollback,
				Key: b.Key})
		}
	}
	stop(old)
	gone := time.Now().UnixNano()
	return func() {
		e.awaitTakeOver(slot, old)
		for _, f := range e.moreRecords {
			f.Gone = gone
		}
		old.Kill()
		old.Restart()
	}
}

// awaitTakeOver waits until another server than the former master serves a slot.
func (e *env) awaitTakeOver(slot int, old *testenv.RedisServer) {
	end := time.Now().Add(takeOver)
	for now := e.Cluster.Master(slot); now == old || now == nil; now = e.Cluster.Master(slot) {
		if time.Now().After(end) {
			e.T.Errorf("fault %s: no replica took over within %s", e.what.Name, takeOver)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}
