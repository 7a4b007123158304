//go:build !production

package devserver

import (
	"fmt"

	"github.com/alicebob/miniredis/v2"
)

// Embedded reports whether this build contains the servers.
const Embedded = true

// StartRedis starts an empty store on loopback, on the preferred port if that is free.
func StartRedis(preferredPort int) (*Server, error) {
	return onFreePort(preferredPort, func(addr string) (*Server, error) {
		m := miniredis.NewMiniRedis()
		if err := m.StartAddr(addr); err != nil {
			return nil, fmt.Errorf("devserver: start the store: %w", err)
		}
		m.ClockTTL(true) // keys expire when their time is over
		return &Server{addr: m.Addr(), stop: m.Close}, nil
	})
}
