package devserver

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
)

// portAttempts is the most attempts to start a server. An attempt fails if another program uses the free port before
// the server does.
const portAttempts = 5

// FreeAddr returns a loopback address without a listener: the one with the preferred port if that is free, otherwise
// one with another port. Another program may take it before the caller does.
func FreeAddr(preferred int) (string, error) {
	ln, err := net.Listen("tcp", loopback(preferred))
	if err != nil {
		ln, err = net.Listen("tcp", loopback(0))
		if err != nil {
			return "", fmt.Errorf("devserver: find a free port: %w", err)
		}
	}
	addr := ln.Addr().String()
	return addr, ln.Close()
}

// onFreePort starts a server on a free loopback address.
func onFreePort(preferred int, start func(addr string) (*Server, error)) (*Server, error) {
	for attempt := 1; ; attempt++ {
		addr, err := FreeAddr(preferred)
		if err != nil {
			return nil, err
		}
		s, err := start(addr)
		if err == nil || attempt == portAttempts || !errors.Is(err, syscall.EADDRINUSE) {
			return s, err
		}
	}
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
