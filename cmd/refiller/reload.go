package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/cli/filewatch"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/timing"
)

// reloader asks for a reload when the file or what is shared in etcd changes, or
// the process gets SIGHUP.
type reloader struct {
	file   *filewatch.File
	shared *etcdconn.Key // nil: nothing is
	hup    chan os.Signal
}

// newReloader begins to listen, so that no change after the first read of the
// file is missed. It must be run or closed.
func newReloader(path string, shared *etcdconn.Key, log hclog.Logger) (*reloader, error) {
	file, err := filewatch.New(path, filewatch.Options{Logger: log})
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	r := &reloader{file: file, shared: shared, hup: make(chan os.Signal, 1)}
	signal.Notify(r.hup, syscall.SIGHUP)
	return r, nil
}

// run writes to asked why a reload is due, until ctx ends.
func (r *reloader) run(ctx context.Context, asked chan<- string) {
	var watching sync.WaitGroup
	defer watching.Wait()
	watch := func(run func(ctx context.Context, changed func())) <-chan struct{} {
		changes := make(chan struct{}, 1) // one that waits stands for all
		watching.Go(func() {
			run(ctx, func() { timing.Signal(changes) })
		})
		return changes
	}
	file := watch(r.file.Run)
	var shared <-chan struct{}
	if r.shared != nil {
		shared = watch(r.shared.Run)
	}
	for {
		cause := ""
		select {
		case <-ctx.Done():
			return
		case <-file:
			cause = "file changed"
		case <-shared:
			cause = r.shared.Name() + " changed in etcd"
		case <-r.hup:
			cause = "SIGHUP"
		}
		select {
		case <-ctx.Done():
			return
		case asked <- cause:
		}
	}
}

// close lets go of what newReloader took; it is called after run has returned,
// or instead of run.
func (r *reloader) close() {
	signal.Stop(r.hup)
	_ = r.file.Close() // nothing is read from it any more
}
