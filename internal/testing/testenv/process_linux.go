package testenv

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownedProcess gives a child its own process group, so that a signal reaches its children too, and has the kernel
// kill it when the thread that started it ends, which is when the test binary does: Go ends a thread early only for a
// goroutine that exits locked to it.
func ownedProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitStopped waits until SIGSTOP has taken effect, or the process has ended. WNOWAIT leaves the state to be waited
// for again.
func awaitStopped(pid int) error {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD): // ended and reaped
			return nil
		default:
			return err
		}
	}
}
