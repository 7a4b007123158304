package main

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReplicasDieWithDev(t *testing.T) {
	t.Parallel()
	p := startDev(t, "--mode", "race")
	p.find(ready)
	require.Len(t, p.replicas(), 3)
	p.Kill() // kills its process group; each replica is in another one
	for _, pid := range p.replicas() {
		require.Eventually(t, func() bool { return syscall.Kill(pid, 0) != nil }, patience, 10*time.Millisecond)
	}
}
