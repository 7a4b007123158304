package pool

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/tokenrefill/refiller/internal/timing"
)

// AwaitRights waits while etcd refuses this process the rights that a coordinator needs, but not beyond the end of ctx.
// It returns if a request to etcd fails for another reason or isn't answered in time. Without the wait, a process that
// lacks the rights would be elected and resign again and again, and no other process would lead in that time.
func (c *Coordinator) AwaitRights(ctx context.Context) {
	refused := false
	for c.refused(ctx) {
		if !refused {
			c.log.Error("etcd refuses this replica the right to write epoch and share/: it can't coordinate the pools")
			refused = true
		}
		timing.Sleep(ctx.Done(), c.timing.Lease)
	}
}

// refused reports whether this process lacks the rights for the writes of a coordinator. It sends them in a transaction
// whose condition is never true. etcd checks the rights before the condition.
func (c *Coordinator) refused(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, c.timing.request())
	defer cancel()
	_, err := c.registry.commit(ctx, leadership{}, []write{{key: epochKey, seen: -1}, {key: shareKeys, seen: -1}})
	return errors.Is(err, rpctypes.ErrPermissionDenied)
}
