package election

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/timing"
)

// candidateEndpoints names the environment variable that turns the test program into a candidate, for tests that stop
// a whole process.
const candidateEndpoints = "ELECTION_TEST_ENDPOINTS"

func TestMain(m *testing.M) {
	if endpoints := os.Getenv(candidateEndpoints); endpoints != "" {
		if err := candidate(strings.Split(endpoints, ",")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if code == 0 {
		if left := leakedGoroutines(); left != "" {
			fmt.Fprintf(os.Stderr, "goroutines of this package are left:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// candidate campaigns and leads until the process is killed. While its term is trusted, it prints a line about every
// millisecond. The tests count each line as an act of the leader.
func candidate(endpoints []string) error {
	client, err := etcdconn.Open(etcdconn.Options{Endpoints: endpoints})
	if err != nil {
		return err
	}
	e, err := New(etcdConfig(client, "process"))
	if err != nil {
		return err
	}
	return e.Run(context.Background(), func(ctx context.Context, term Term) error {
		for {
			if ctx.Err() == nil && term.Remaining(time.Now()) > 0 {
				fmt.Printf("acts epoch=%d at=%d\n", term.Epoch, time.Now().UnixMilli())
			}
			if !timing.Sleep(ctx.Done(), time.Millisecond) {
				fmt.Printf("lost epoch=%d cause=%v\n", term.Epoch, context.Cause(ctx))
				return nil
			}
		}
	})
}
