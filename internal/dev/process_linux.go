package dev

import "syscall"

// ownedProcess gives a replica its own process group, so that Ctrl-C reaches this program alone, and has the kernel
// kill it when this program ends.
func ownedProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
