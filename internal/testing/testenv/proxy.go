package testenv

import (
	"errors"
	"net"
	"strconv"
	"syscall"
	"testing"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
)

// Proxy starts a proxy in front of the server at target, a host and port, and closes it when the test ends. The proxy's
// port stays reserved while the proxy is cut. seed is the Seed of [faultproxy.Options].
func Proxy(t testing.TB, target string, seed uint64) *faultproxy.Proxy {
	t.Helper()
	var p *faultproxy.Proxy
	onFreePorts(t, 1, func(ports []int) (err error) {
		p, err = faultproxy.New(target, faultproxy.Options{Listen: loopback(ports[0]), Seed: seed})
		if errors.Is(err, syscall.EADDRINUSE) {
			return errPortTaken
		}
		return err
	})
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// frontOf starts a proxy in front of the server on a port. It returns the proxy and the port that clients must use.
// Without [WithProxies] it starts none, and returns the server's own port.
func frontOf(t testing.TB, o options, port int) (p *faultproxy.Proxy, announced string) {
	t.Helper()
	if !o.proxies {
		return nil, strconv.Itoa(port)
	}
	p = Proxy(t, loopback(port), 0)
	_, announced, err := net.SplitHostPort(p.Addr())
	if err != nil {
		t.Fatalf("testenv: address of a proxy: %v", err)
	}
	return p, announced
}
