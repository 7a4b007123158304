package testenv

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
)

// orphanEnv makes the test binary start a Redis server, print its address and wait to be killed.
const orphanEnv = "REFILLER_TESTENV_ORPHAN"

func TestMain(m *testing.M) {
	if os.Getenv(orphanEnv) != "" {
		s := Redis(&recorder{name: "orphan"})
		fmt.Printf("serving at %s in %s\n", s.Addr(), s.Dir())
		select {}
	}
	os.Exit(m.Run())
}

// recorder is the testing.TB of a simulated test that uses this package. It records the output and the failure.
type recorder struct {
	testing.TB
	name string

	mu       sync.Mutex
	failed   bool
	output   strings.Builder
	cleanups []func()
}

// newRecorder returns a recorder whose kept files are removed when t ends.
func newRecorder(t *testing.T, name string) *recorder {
	r := &recorder{name: name}
	t.Cleanup(func() {
		for _, kept := range regexp.MustCompile(`kept in (\S+);`).FindAllStringSubmatch(r.output.String(), -1) {
			_ = os.RemoveAll(kept[1])
		}
	})
	return r
}

func (r *recorder) Helper()      {}
func (r *recorder) Name() string { return r.name }

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

func (r *recorder) Logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(&r.output, format+"\n", args...)
}

func (r *recorder) Errorf(format string, args ...any) {
	r.Logf(format, args...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

// run runs a test and its cleanups, and returns the output.
func (r *recorder) run(test func()) string {
	var wg sync.WaitGroup
	wg.Go(test)
	wg.Wait()
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
	return r.output.String()
}
