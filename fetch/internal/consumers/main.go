// Command consumers takes tokens from a healthy Redis in each of three ways, and prints how many takes failed. Tests
// stop the process, or deprive it of processor time, and expect that no take fails because of that.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
)

var (
	addr       = flag.String("addr", "", "of the Redis")
	prefix     = flag.String("prefix", "", "of the buckets' keys, which end in a number")
	buckets    = flag.Int("buckets", 1, "how many there are")
	goroutines = flag.Int("goroutines", 1, "that take")
	pace       = flag.Duration("pace", 0, "between two takes of a goroutine")
	timeout    = flag.Duration("timeout", fetch.DefaultTimeout, "of a take")
	duration   = flag.Duration("duration", time.Second, "of each way")
)

// way is one of the ways to set up a Client.
type way struct {
	name  string
	redis redis.Options
	opts  []fetch.Option
}

func main() {
	flag.Parse()
	for _, w := range []way{
		{name: "default"},
		{name: "context", redis: redis.Options{ContextTimeoutEnabled: true}},
		{name: "leases", opts: []fetch.Option{fetch.WithLease(1000, time.Second)}},
	} {
		if err := w.run(); err != nil {
			fmt.Printf("%s: %v\n", w.name, err) // the takes of this way are missing
		}
	}
}

func (w *way) run() error {
	w.redis.Addr = *addr
	rdb := redis.NewClient(&w.redis)
	c, err := fetch.New(rdb, append(w.opts, fetch.WithTimeout(*timeout))...)
	if err != nil {
		return err
	}
	for i := range 20 { // opens connections, and loads the script
		if _, err := c.Take(context.Background(), key(i), 1, fetch.WithTimeout(time.Minute)); err != nil {
			return err
		}
	}
	var takes, failed atomic.Int64
	var cause atomic.Pointer[error]
	var wg sync.WaitGroup
	end := time.Now().Add(*duration)
	for g := range *goroutines {
		wg.Go(func() {
			for i := g; time.Now().Before(end); i++ {
				began := time.Now()
				_, err := c.Take(context.Background(), key(i), 1)
				takes.Add(1)
				if err != nil {
					failed.Add(1)
					cause.Store(&err)
				}
				time.Sleep(time.Until(began.Add(*pace)))
			}
		})
	}
	wg.Wait()
	fmt.Printf("%s: takes %d failed %d opened %d", w.name, takes.Load(), failed.Load(), c.Stats().BreakerOpened)
	if err := cause.Load(); err != nil {
		fmt.Printf(" (%v)", *err)
	}
	fmt.Println()
	return errors.Join(c.Close(context.Background()), rdb.Close())
}

func key(i int) string { return fmt.Sprint(*prefix, i%*buckets) }
