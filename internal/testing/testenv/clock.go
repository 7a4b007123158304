package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// WithClock makes a Redis server use libfaketime's clock, which [RedisServer.StepClock] sets.
func WithClock() Option { return func(o *options) { o.clock = true } }

// clockEnv returns environment variables that make a server read its clock through libfaketime, which reads the offset
// from file. The C library is preloaded too. Otherwise the allocator of some servers would ask for the time before
// libfaketime is ready.
func clockEnv(t testing.TB, file string) []string {
	t.Helper()
	find := func(patterns ...string) string {
		for _, p := range patterns {
			if found, err := filepath.Glob(p); err == nil && len(found) > 0 {
				return found[0]
			}
		}
		return ""
	}
	lib := find("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1",
		"/usr/lib64/faketime/libfaketime.so.1")
	if lib == "" {
		t.Fatal("testenv: libfaketime is missing, which steps the clock of Redis: install it (apt install libfaketime, apk add libfaketime)")
	}
	preload := lib
	if libc := find("/lib/*-linux-gnu*/libc.so.6", "/usr/lib/*-linux-gnu*/libc.so.6", "/lib64/libc.so.6"); libc != "" {
		preload += ":" + libc
	}
	return []string{"LD_PRELOAD=" + preload, "FAKETIME_TIMESTAMP_FILE=" + file, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1"}
}

// StepClock sets the clock of a server that was started [WithClock] to the true time plus d.
func (s *RedisServer) StepClock(d time.Duration) {
	s.t.Helper()
	if s.options.clockFile == "" {
		s.t.Error("testenv: StepClock needs a server that was started WithClock")
		return
	}
	if err := writeClock(s.options.clockFile, d); err != nil {
		s.t.Error(err)
	}
}

// writeClock writes the offset d into file. It writes a second file and renames that, so that a server never reads half
// of a number.
func writeClock(file string, d time.Duration) error {
	next := file + ".next"
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+.6f\n", d.Seconds()), 0o600); err != nil {
		return fmt.Errorf("testenv: step the clock: %w", err)
	}
	if err := os.Rename(next, file); err != nil {
		return fmt.Errorf("testenv: step the clock: %w", err)
	}
	return nil
}
