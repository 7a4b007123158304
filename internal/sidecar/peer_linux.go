package sidecar

import (
	"net"
	"strconv"
	"syscall"
)

// peerProcess returns a name for the process that opened the connection.
func peerProcess(c *net.UnixConn) string {
	const unknown = "unix socket"
	raw, err := c.SyscallConn()
	if err != nil {
		return unknown
	}
	var cred *syscall.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err != nil || credErr != nil {
		return unknown
	}
	return "process " + strconv.Itoa(int(cred.Pid))
}
