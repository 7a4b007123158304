package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/tokenrefill/refiller/internal/timing"
)

// ErrBehind is returned when records come faster than they can be written to the file.
var ErrBehind = errors.New("history: too many records wait to be written")

// maxPending bounds the bytes that wait to be written.
const maxPending = 64 << 20

// Writer appends records to a file. Its methods are safe for concurrent use.
type Writer struct {
	file *os.File
	wake chan struct{} // holds one token while there is something to write
	done chan struct{} // closed when the writing goroutine has ended

	failed chan struct{} // closed with the first failure

	mu      sync.Mutex
	pending []byte
	closed  bool
	err     error // the first failure; after it nothing is recorded
}

// Open opens a file for appending, and creates it if needed. The Writer must be closed.
func Open(path string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	w := &Writer{file: f, wake: make(chan struct{}, 1), done: make(chan struct{}), failed: make(chan struct{})}
	go w.run()
	return w, nil
}

// Add records v as one line. It doesn't wait for the file: a goroutine writes all records that have been added. Close
// returns the first failure.
func (w *Writer) Add(v any) {
	line, err := json.Marshal(v)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.closed || w.err != nil:
		return
	case err != nil:
		w.fail(fmt.Errorf("history: %w", err))
		return
	case len(w.pending)+len(line) > maxPending:
		w.fail(ErrBehind)
		return
	}
	w.pending = append(append(w.pending, line...), '\n')
	timing.Signal(w.wake)
}

// Failed returns a channel that is closed at the first failure. Nothing is recorded after it.
func (w *Writer) Failed() <-chan struct{} { return w.failed }

// fail records the first failure. The caller holds the lock.
func (w *Writer) fail(err error) {
	if w.err == nil {
		close(w.failed)
	}
	w.err = errors.Join(w.err, err)
}

func (w *Writer) run() {
	defer close(w.done)
	var lines []byte
	for range w.wake {
		w.mu.Lock()
		lines, w.pending = w.pending, lines[:0]
		w.mu.Unlock()
		if _, err := w.file.Write(lines); err != nil {
			w.mu.Lock()
			w.fail(fmt.Errorf("history: %w", err))
			w.mu.Unlock()
		}
	}
}

// Close writes the remaining records, closes the file and returns the first failure since Open. Records added later are
// dropped. A second Close only returns the same result.
func (w *Writer) Close() error {
	w.mu.Lock()
	first := !w.closed
	w.closed = true
	if first {
		close(w.wake)
	}
	w.mu.Unlock()
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()
	if first {
		if err := w.file.Close(); err != nil {
			w.fail(fmt.Errorf("history: %w", err))
		}
	}
	return w.err
}
