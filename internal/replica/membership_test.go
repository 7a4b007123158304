package replica_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestReplicasListEachOther(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	cfg := parse(t, server.URL(), 7, "  - {key: a, capacity: 10, rate: 1/s}\n")
	first := running(t, cfg, replica.Options{Identity: "first", Build: "v1"})
	second, err := replica.New(cfg, replica.Options{Identity: "second", Build: "v2", Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- second.Run(ctx) }()

	listed := func() string {
		var list []string
		for _, r := range first.Status(t.Context(), admin.Query{}).Replicas {
			list = append(list, fmt.Sprintf("%s %s: %s under %d", r.Identity, r.Build, r.Role, r.Config))
		}
		return strings.Join(list, ", ")
	}
	eventually(t, "both replicas are listed", func() bool {
		return listed() == "first v1: races under 7, second v2: races under 7"
	})
	stop()
	require.NoError(t, <-done)
	eventually(t, "the replica that left is not listed", func() bool { return listed() == "first v1: races under 7" })
}
