package fetch

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A server closes connections that are idle. If it accepts no other connection, the remaining one is used.
func TestALoneCallerNeedsNoLostConnection(t *testing.T) {
	t.Parallel()
	d := newDialler(t)
	server, c := d.lone(t)
	own := c.nodes.single.sockets[0] // of lone calls
	opens := func() bool { return granted(c.Take(t.Context(), "checkout", 1)) == nil && own.Alive() }
	eventually(t, opens, "the second connection is opened")
	d.refuse.Store(true)
	id := c.nodes.express.ClientID(t.Context()).Val()
	require.NoError(t, server.Client().Do(t.Context(), "client", "kill", "id", id).Err())
	eventually(t, func() bool { return !own.Alive() }, "the second connection is closed")
	require.NoError(t, granted(c.Take(t.Context(), "checkout", 1)))
	d.refuse.Store(false)
	eventually(t, opens, "the second connection is opened again")
}
