package testenv

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// The last of the allowed attempts finds a free port. All ports before it are reserved.
func TestTheLastAttemptMayFindAPort(t *testing.T) {
	t.Parallel()
	reserved := Ports(t, 1)[0]
	holder := newRecorder(t, "holder")
	free := Ports(holder, 1)[0]
	attempts := 0
	ports := reservePorts(t, 1, func() int {
		attempts++
		if attempts < portAttempts {
			return reserved
		}
		holder.run(func() {}) // its cleanups release the port
		return free
	})
	require.Equal(t, []int{free}, ports)
	require.Equal(t, portAttempts, attempts)
}

func TestTheSearchForPortsEnds(t *testing.T) {
	t.Parallel()
	reserved := Ports(t, 1)[0]
	r := newRecorder(t, "search")
	out := r.run(func() { reservePorts(r, 1, func() int { return reserved }) })
	require.True(t, r.Failed())
	require.Contains(t, out, "only 0 of 1 free ports found in 200 attempts")
}
