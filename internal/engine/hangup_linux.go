package engine

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// hungUp reports whether the other end has closed a connection. raw may be nil if it is hidden; then hungUp returns
// false. Unlike a read, it works below TLS, where data is no reply: it may be a session ticket.
func hungUp(raw syscall.RawConn) bool {
	if raw == nil {
		return false
	}
	fds := [1]unix.PollFd{{Events: unix.POLLRDHUP}} // errors are reported without being asked for
	err := raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		_, _ = unix.Poll(fds[:], 0) // after an error, Revents is 0
	})
	return err != nil || fds[0].Revents != 0
}
