package terminal_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

// pseudoTerminal opens a terminal with this number of columns.
func pseudoTerminal(t *testing.T, columns uint16) *os.File {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = master.Close() }) // it isn't read
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tty.Close() })
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}))
	return tty
}

func TestATerminalHasAWidthAndColors(t *testing.T) {
	t.Parallel()
	tty := pseudoTerminal(t, 80)
	s := terminal.Of(tty, nil)
	require.True(t, s.Rewrites())
	require.True(t, s.Colors())
	require.Equal(t, 80, s.Width())
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 132}))
	require.Equal(t, 132, s.Width(), "the width follows the window")

	require.False(t, terminal.Of(tty, map[string]string{"NO_COLOR": "1"}).Colors())
	require.True(t, terminal.Of(tty, map[string]string{"NO_COLOR": "1"}).Rewrites())
	require.True(t, terminal.Of(tty, map[string]string{"NO_COLOR": ""}).Colors(), "an empty NO_COLOR has no effect")
	require.False(t, terminal.Of(tty, map[string]string{"TERM": "dumb"}).Rewrites())
}
