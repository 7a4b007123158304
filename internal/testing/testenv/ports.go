package testenv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// Ports are drawn from [minPort, maxPort). This is below the ephemeral ports of Linux, from 32768, and macOS, from
// 49152. So the kernel doesn't give the port of a server that is down to an outgoing connection, and a client that
// dials such a port never connects to itself.
const (
	minPort = 10000
	maxPort = 32000
	// portAttempts is how many ports Ports tries.
	portAttempts = 200
	// bindAttempts is how often a server is started if other programs take its ports before it listens.
	bindAttempts = 5
)

// Ports returns n free loopback ports. Until the test ends, no other test gets them, whether in this test binary or in
// another one.
func Ports(t testing.TB, n int) []int {
	t.Helper()
	return reservePorts(t, n, func() int { return minPort + rand.IntN(maxPort-minPort) })
}

// reservePorts calls candidate for ports until n of them are free, and reserves these.
func reservePorts(t testing.TB, n int, candidate func() int) []int {
	t.Helper()
	dir := portsDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatalf("testenv: reserve ports: %v", err)
	}
	ports := make([]int, 0, n)
	for attempt := 0; len(ports) < n; attempt++ {
		if attempt == portAttempts {
			t.Fatalf("testenv: only %d of %d free ports found in %d attempts", len(ports), n, portAttempts)
		}
		port := candidate()
		lock, err := lockFile(filepath.Join(dir, strconv.Itoa(port)), syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			continue
		}
		if err != nil {
			t.Fatalf("testenv: reserve port %d: %v", port, err)
		}
		ln, err := net.Listen("tcp", loopback(port))
		if err != nil {
			_ = lock.Close()
			continue
		}
		_ = ln.Close()
		t.Cleanup(func() { _ = lock.Close() }) // closing releases the lock
		ports = append(ports, port)
	}
	return ports
}

// portsDir returns the directory of the lock files. It has one for each port that was ever reserved.
func portsDir() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("refiller-testenv-ports-%d", os.Getuid()))
}

// onFreePorts calls start with n reserved ports. It calls start again with other ports if another program took one of
// them meanwhile.
func onFreePorts(t testing.TB, n int, start func(ports []int) error) {
	t.Helper()
	var err error
	for range bindAttempts {
		err = start(Ports(t, n))
		if !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// lockFile opens path, creating the file if needed, and locks it as flock(2) does with how. The lock ends when the file
// is closed, or with the process. Child processes don't inherit it.
func lockFile(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), how); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
