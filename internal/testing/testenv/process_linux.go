package testenv

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownedProcess gives a child process its own process group, so that a signal reaches the child's children too. It also
// makes the kernel kill the child when the thread that started it ends. That is when the test binary ends: Go ends a
// thread earlier only if a goroutine that is locked to it exits.
func ownedProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitStopped waits until SIGSTOP has stopped the process, or the process has ended. WNOWAIT leaves the process to the
// later Wait of package exec.
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
