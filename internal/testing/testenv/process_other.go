//go:build unix && !linux

package testenv

import "syscall"

// ownedProcess gives a child its own process group, so that a signal reaches its children too.
func ownedProcess() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitStopped does nothing on these systems, because SIGSTOP takes effect within microseconds.
func awaitStopped(int) error { return nil }
