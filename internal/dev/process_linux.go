package dev

import "syscall"

// ownedProcess gives a replica its own process group, so that Ctrl-C reaches only this program. It also makes the
// kernel kill the replica when this program ends.
func ownedProcess() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
