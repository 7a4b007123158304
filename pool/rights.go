package pool

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/tokenrefill/refiller/internal/timing"
)

// AwaitRights waits until etcd lets this process write what a coordinator writes, or until ctx ends. Without the rights
// it would be elected and resign again and again, and keep others from leading meanwhile.
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

// refused reports whether etcd refuses the writes of a coordinator for want of rights. It tries them under a guard that
// never holds, which etcd checks after the rights.
func (c *Coordinator) refused(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, c.timing.request())
	defer cancel()
	_, err := c.registry.commit(ctx, leadership{}, []write{{key: epochKey, seen: -1}, {key: shareKeys, seen: -1}})
	return errors.Is(err, rpctypes.ErrPermissionDenied)
}
