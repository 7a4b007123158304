package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/filewatch"
)

// reloader asks for a reload when a file changes or the process gets SIGHUP.
type reloader struct {
	path string
	file *filewatch.File
	hup  chan os.Signal
}

// newReloader begins to listen, so that no change after the first read of the
// file is missed. It must be run or closed.
func newReloader(path string, log hclog.Logger) (*reloader, error) {
	file, err := filewatch.New(path, filewatch.Options{Logger: log})
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	r := &reloader{path: path, file: file, hup: make(chan os.Signal, 1)}
	signal.Notify(r.hup, syscall.SIGHUP)
	return r, nil
}

// run writes to asked why a reload is due, until ctx ends.
func (r *reloader) run(ctx context.Context, asked chan<- string) {
	changed := make(chan struct{}, 1) // one that waits stands for all
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		r.file.Run(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	defer func() { <-watched }()
	for {
		cause := ""
		select {
		case <-ctx.Done():
			return
		case <-changed:
			cause = "file changed"
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
