package pool

import (
	"context"
	"errors"
	"strings"
)

// Keys below a registry's prefix. The keys of the coordinators' election are beside them, under lead/.
const (
	configKey   = "cfg"
	reportKeys  = "rep/"
	shareKeys   = "share/"
	fenceKeys   = "fence/"
	leaderKeys  = "lead/"
	epochKey    = "epoch" // the highest epoch in use, in decimal
	maxTxnWrite = 100     // writes of one transaction; etcd allows 128 operations
	maxTxnBytes = 1 << 20 // bytes of one transaction, unless a single share has more; etcd allows 1.5 MiB
	// maxShareBytes is the largest share that etcd accepts. It leaves room for the key and the guards of the transaction.
	maxShareBytes = 3<<19 - 4096
)

// entry is a key's content at its last modification.
type entry struct {
	key      string // without the prefix
	value    string
	revision int64 // of the modification
	deleted  bool
}

// send sends an entry, unless ctx ends.
func send(ctx context.Context, to chan<- entry, e entry) error {
	select {
	case to <- e:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// under cuts a leading prefix from the key.
func (e entry) under(prefix string) (rest string, ok bool) { return strings.CutPrefix(e.key, prefix) }

// leadership proves that a coordinator leads. It has the coordinator's key in the election, the revision that created
// the key, and the pool epoch that the coordinator has recorded. The revision can't serve as the pool epoch, because an
// etcd that was restored repeats revisions.
type leadership struct {
	key      string // complete, with the prefix
	revision int64
	epoch    int64 // 0 before it is recorded
}

// write is a change of one key. seen is the revision at which the key was last modified; 0 means that it didn't exist.
type write struct {
	key, value string
	seen       int64
	remove     bool
}

// Reasons why a guarded transaction wrote nothing.
var (
	errConflict = errors.New("pool: a key has changed since it was read")
	errDeposed  = errors.New("pool: another coordinator leads")
)

// errRewound is returned when etcd was restored or emptied. This is detected by a write that has no higher revision
// than an earlier read, or by a read that has a lower revision. Watches of the old history deliver nothing, so all keys
// are read again.
var errRewound = errors.New("pool: etcd has gone back to an earlier revision: its watch delivers nothing more")

// registry is the store that the regions and the coordinator share. It is consistent, and one transaction can compare
// and write. All calls return when ctx ends. A write that fails may still have been made, or may be made later.
//
// # Keys in etcd, below the prefix
//
//	epoch           the highest pool epoch that was used
//	cfg             the settings with the highest version that a replica had
//	lead/…          the election of the coordinator
//	rep/<region>    the region's tickets of all pools, written together once in each period H (Timing.Report)
//	share/<region>  the region's grants, and older ones that it may still use
//	fence/<region>  an operator has fenced the region (it uses nothing) or drains it (it must use nothing)
//
// # When etcd is restored
//
// An etcd that was restored or emptied shows older keys and revisions, and may lack grants that are in force.
//
//   - Agents and the coordinator detect this by the revisions, which are not higher than before (errRewound). An agent
//     detects it when it reports (Agent.revision). The coordinator detects it when it writes, or after 2.5 H without an
//     event (term.revision). Each then reads all keys again, since its watch would deliver nothing.
//   - Agents still report the terms in force. They write the latest settings that they have read (Agent.newest), if the
//     settings in etcd are older.
//   - A coordinator that begins a term and finds shares waits 2.5 H for reports (term.incompleteUntil). While it
//     waits, it offers a region no more than the terms that the region's ticket shows in force.
//   - A ticket is foreign if it shows a later fence, or a later end of a grant, than was ever offered
//     (ledger.applyTicket). The coordinator then raises its pool epoch above the ticket's and waits again, now for as
//     long as the longest lease can last. In the meantime shares have a flag for this (term.restoredUntil), so that the
//     next coordinator waits, too.
//   - If all grants have ended when a coordinator begins, the regions may have moved to another etcd since then
//     (ledger.doubted). So a pool with a silent region is closed until that region has acknowledged the pool again or
//     is fenced.
//   - If no share of a pool is left, the pool counts as a new one: the regions have floors until each of them has
//     acknowledged the pool.
type registry interface {
	// load reads some keys, or all if none is named, at one revision.
	load(ctx context.Context, keys ...string) (entries []entry, revision int64, err error)
	// watch sends the changes of some keys, or of all if none is named, from a revision on. It returns only when ctx ends
	// or the watch fails.
	watch(ctx context.Context, from int64, to chan<- entry, keys ...string) error
	// put writes a key.
	put(ctx context.Context, key, value string) (revision int64, err error)
	// commit makes all writes at one revision. It returns errDeposed if the leadership has ended. It returns errConflict
	// if a key was modified since it was read, or if the pool epoch is not that of l. A leadership without a key isn't
	// checked.
	commit(ctx context.Context, l leadership, writes []write) (revision int64, err error)
}
