//go:build unix && !linux

package testenv

import "syscall"

// ownedProcess gives a child process its own process group, so that a signal reaches the child's children too.
func ownedProcess() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitStopped does nothing on these systems, because SIGSTOP stops a process within microseconds.
func awaitStopped(int) error { return nil }
