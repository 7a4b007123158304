//go:build unix && !linux

package dev

import "syscall"

// ownedProcess gives a replica its own process group, so that Ctrl-C reaches only this program.
func ownedProcess() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
