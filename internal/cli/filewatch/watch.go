package filewatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/hashicorp/go-hclog"
)

const (
	// settle is the time from an event to the reading of the file. So a burst of events causes only one reading. The same
	// holds for a file that is being written.
	settle = 50 * time.Millisecond
	// DefaultPoll is the time between two readings without an event.
	DefaultPoll = 5 * time.Second
	// blindPoll replaces DefaultPoll while there are no events.
	blindPoll = 500 * time.Millisecond
)

// Options are choices of a File that have defaults.
type Options struct {
	Poll   time.Duration // between two readings without an event; 0 means DefaultPoll
	Logger hclog.Logger  // nil means none
	Gone   bool          // Run also reports that the file can't be read any more
}

// File is a file, or a directory of YAML files, that is watched as soon as New has returned.
type File struct {
	path       string
	poll       time.Duration
	log        hclog.Logger
	reportGone bool // Options.Gone
	seen       [sha256.Size]byte
	present    bool              // the last reading succeeded
	gone       bool              // the file was missing at some time since the last report
	events     *fsnotify.Watcher // nil if the file is only polled
}

// New begins to watch the file or the directory at path. Run reports every content that differs from the content at
// this call. The content of a directory is the content of its YAML files, with their names. The path must be readable.
// The File must be run or closed.
func New(path string, o Options) (*File, error) {
	f := &File{path: path, poll: o.Poll, log: o.Logger, reportGone: o.Gone}
	if f.poll == 0 {
		f.poll = DefaultPoll
	}
	if f.log == nil {
		f.log = hclog.NewNullLogger()
	}
	events, err := fsnotify.NewWatcher()
	if err == nil {
		f.events = events
		err = f.watch()
	}
	if err != nil {
		f.blind(err)
	}
	f.seen, err = Sum(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("filewatch: %w", err), f.Close())
	}
	f.present = true
	return f, nil
}

// Close releases a File whose Run was not called.
func (f *File) Close() error {
	if f.events == nil {
		return nil
	}
	return f.events.Close()
}

// watch watches the directory of the path. If the path is a link, it also watches the directory of the link's target.
// Watching a directory again is no error. It restores the watch of a directory that was replaced.
func (f *File) watch() error {
	if err := f.events.Add(filepath.Dir(f.path)); err != nil {
		return err
	}
	if isDirectory(f.path) {
		// Each file of a mounted ConfigMap is a link through another link in this directory. That other link changes.
		return f.events.Add(f.path)
	}
	target, err := filepath.EvalSymlinks(f.path)
	if err != nil {
		return nil // the target is being replaced
	}
	return f.events.Add(filepath.Dir(target))
}

// blind makes the File poll more often instead of waiting for events.
func (f *File) blind(err error) {
	f.log.Warn("file events are not available: polling", "path", f.path, "interval", blindPoll, "error", err)
	if f.events != nil {
		_ = f.events.Close() // it is not needed any more
	}
	f.events, f.poll = nil, min(f.poll, blindPoll)
}

// Run calls changed after each change of the content, until ctx ends. It calls changed in its caller's goroutine. A
// deletion counts as a change only with Options.Gone. When a deleted file exists again, this counts as a change even if
// its content is the old one. The reason is that a caller may have read the file while it was missing. Several changes
// in quick succession may be reported once.
func (f *File) Run(ctx context.Context, changed func()) {
	defer func() { _ = f.Close() }() // the File is not needed any more
	poll := time.NewTicker(f.poll)
	defer poll.Stop()
	var settled <-chan time.Time
	for {
		var events <-chan fsnotify.Event
		var errs <-chan error
		if f.events != nil {
			events, errs = f.events.Events, f.events.Errors
		}
		select {
		case <-ctx.Done():
			return
		case e := <-events:
			if (e.Has(fsnotify.Remove) || e.Has(fsnotify.Rename)) && filepath.Clean(e.Name) == filepath.Clean(f.path) {
				f.gone = true
			}
			if settled == nil {
				settled = time.After(settle)
			}
		case err := <-errs:
			// The kernel drops events when too many wait.
			f.log.Debug("file events were lost", "path", f.path, "error", err)
			if settled == nil {
				settled = time.After(settle)
			}
		case <-settled:
			settled = nil
			f.refresh(changed)
		case <-poll.C:
			f.refresh(changed)
		}
		if f.events == nil {
			poll.Reset(f.poll)
		}
	}
}

// refresh reads the file and reports its content if it is new.
func (f *File) refresh(changed func()) {
	if f.events != nil {
		if err := f.watch(); err != nil && !errors.Is(err, os.ErrNotExist) {
			f.blind(err)
		}
	}
	now, err := Sum(f.path)
	if err != nil {
		lost := f.present
		f.present, f.gone = false, true
		if lost {
			f.log.Warn("watched file can't be read", "path", f.path, "error", err)
			if f.reportGone {
				changed()
			}
		}
		return
	}
	f.present = true
	if now != f.seen || f.gone {
		f.seen, f.gone = now, false
		changed()
	}
}

// Sum returns the digest of the content of the file at path, or of a directory's YAML files and their names.
func Sum(path string) (digest [sha256.Size]byte, err error) {
	files, err := Files(path)
	if err != nil {
		return digest, err
	}
	h := sha256.New()
	for _, file := range files {
		if file != path {
			fmt.Fprintf(h, "%q\n", file)
		}
		if err := addContent(h, file); err != nil {
			return digest, err
		}
	}
	h.Sum(digest[:0])
	return digest, nil
}

func addContent(h io.Writer, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(h, file)
	return err
}

// Files returns path itself or, if it is a directory, the paths of the YAML files in it, ordered by name. It leaves out
// directories, and files whose names begin with a dot.
func Files(path string) ([]string, error) {
	if !isDirectory(path) {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		ext := filepath.Ext(e.Name())
		file := filepath.Join(path, e.Name())
		if (ext == ".yaml" || ext == ".yml") && !strings.HasPrefix(e.Name(), ".") && !isDirectory(file) {
			files = append(files, file)
		}
	}
	return files, nil
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
