package filewatch

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Reload reports why a program is to read its files again: one of them changed, another source did, or the process got
// SIGHUP. It listens from NewReload on, and must be run or closed.
type Reload struct {
	hup   chan os.Signal
	files []*File
	runs  []func(ctx context.Context, due chan<- string)
}

// NewReload begins to listen for SIGHUP.
func NewReload() *Reload {
	r := &Reload{hup: make(chan os.Signal, 1)}
	signal.Notify(r.hup, syscall.SIGHUP)
	return r
}

// Watch begins to watch a file, as New does.
func (r *Reload) Watch(path string, o Options) error {
	file, err := New(path, o)
	if err != nil {
		return err
	}
	r.files = append(r.files, file)
	r.Follow("file changed", file.Run)
	return nil
}

// Files returns how many files are watched.
func (r *Reload) Files() int { return len(r.files) }

// Follow adds a source. Run calls run, which calls changed for each change until its context ends.
func (r *Reload) Follow(cause string, run func(ctx context.Context, changed func())) {
	r.runs = append(r.runs, func(ctx context.Context, due chan<- string) {
		run(ctx, func() {
			select {
			case due <- cause:
			default: // one waiting request is enough
			}
		})
	})
}

// Run calls read with the cause whenever the files are to be read again, until ctx ends and read has returned.
func (r *Reload) Run(ctx context.Context, read func(cause string)) {
	var running sync.WaitGroup
	defer running.Wait()
	due := make(chan string, 1)
	for _, run := range r.runs {
		running.Go(func() { run(ctx, due) })
	}
	for {
		select {
		case <-ctx.Done():
			return
		case cause := <-due:
			read(cause)
		case <-r.hup:
			read("SIGHUP")
		}
	}
}

// Close releases what NewReload and Watch acquired. It is called after Run has returned, or instead of Run.
func (r *Reload) Close() error {
	signal.Stop(r.hup)
	var first error
	for _, file := range r.files {
		if err := file.Close(); err != nil && first == nil {
			first = fmt.Errorf("filewatch: %w", err)
		}
	}
	return first
}
