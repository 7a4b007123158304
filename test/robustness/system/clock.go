package system

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// errNoFaketime says what is missing for steps of the clock.
var errNoFaketime = errors.New("system: libfaketime is missing, which steps the clock of Redis: install it (apt install libfaketime, apk add libfaketime)")

// clockEnv has a server read its clock through libfaketime, with the offset that the file holds. The C library comes
// before the allocators that servers are linked with: some of them ask for the time before libfaketime is ready.
func clockEnv(file string) ([]string, error) {
	find := func(patterns ...string) string {
		for _, p := range patterns {
			if found, err := filepath.Glob(p); err == nil && len(found) > 0 {
				return found[0]
			}
		}
		return ""
	}
	lib := find("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1", "/usr/lib64/faketime/libfaketime.so.1")
	if lib == "" {
		return nil, errNoFaketime
	}
	preload := lib
	if libc := find("/lib/*-linux-gnu*/libc.so.6", "/usr/lib/*-linux-gnu*/libc.so.6", "/lib64/libc.so.6"); libc != "" {
		preload += ":" + libc
	}
	return []string{"LD_PRELOAD=" + preload, "FAKETIME_TIMESTAMP_FILE=" + file, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"}, nil
}

// StepClock sets the single Redis' clock to the true time plus d.
func (s *System) StepClock(d time.Duration) {
	// Written beside and renamed, so that Redis never reads half a number.
	next := s.clock + ".next"
	if err := os.WriteFile(next, fmt.Appendf(nil, "%+.6f\n", d.Seconds()), 0o600); err != nil {
		s.T.Error(err)
		return
	}
	if err := os.Rename(next, s.clock); err != nil {
		s.T.Error(err)
	}
}
