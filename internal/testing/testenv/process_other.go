//go:build unix && !linux

package testenv

import "syscall"

// ownedProcess gives a child its own process group, so that a signal reaches its children too.
func ownedProcess() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitStopped does nothing: the signal takes effect within microseconds.
func awaitStopped(int) error { return nil }
