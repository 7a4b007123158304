package filewatch

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Reload reports when a program has to read its files again, and the cause. A file or another source has changed, or
// the process got SIGHUP. Reload listens as soon as NewReload has returned. It must be run or closed.
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

// Files returns the number of watched files.
func (r *Reload) Files() int { return len(r.files) }

// Follow adds a source of changes. Run calls run, and run calls changed for each change until its context ends.
func (r *Reload) Follow(cause string, run func(ctx context.Context, changed func())) {
	r.runs = append(r.runs, func(ctx context.Context, due chan<- string) {
		run(ctx, func() {
			select {
			case due <- cause:
			default: // a reload is already due
			}
		})
	})
}

// Run calls read with the cause whenever the files have to be read again. It returns when ctx has ended and read has
// returned.
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

// Close releases the resources of NewReload and Watch. It is called after Run has returned, or instead of Run.
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
