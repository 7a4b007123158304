//go:build unix && !linux

package dev

import "syscall"

// ownedProcess gives a replica its own process group, so that Ctrl-C reaches this program alone.
func ownedProcess() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
