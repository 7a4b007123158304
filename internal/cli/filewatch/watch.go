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
	// settle is the time between an event and the reading of the file, so that a burst of events, or a file that is being
	// written, causes one reading.
	settle = 50 * time.Millisecond
	// DefaultPoll is the time between two readings without an event.
	DefaultPoll = 5 * time.Second
	// blindPoll is used instead while there are no events.
	blindPoll = 500 * time.Millisecond
)

// Options are choices of a File that have defaults.
type Options struct {
	Poll   time.Duration // between two readings without an event; 0 means DefaultPoll
	Logger hclog.Logger  // nil means none
	Gone   bool          // Run reports it as well when the file can't be read any more
}

// File is a file, or a directory of YAML files, that is watched from New on.
type File struct {
	path       string
	poll       time.Duration
	log        hclog.Logger
	reportGone bool // Options.Gone
	seen       [sha256.Size]byte
	present    bool              // it could be read the last time
	gone       bool              // it was missing at some time after it was last reported
	events     *fsnotify.Watcher // nil: polling alone
}

// New begins to watch the file or the directory at path: Run reports every content other than that at the call of New.
// The content of a directory is that of its YAML files, with their names. It must be readable. The File must be run or
// closed.
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

// watch watches the directory of the path and, if the path is a link, that of the file to which it leads. Watching a
// directory again is no error, and mends the watch of one that was replaced.
func (f *File) watch() error {
	if err := f.events.Add(filepath.Dir(f.path)); err != nil {
		return err
	}
	if isDirectory(f.path) {
		// Each file of a mounted ConfigMap is a link through another link in this directory, which changes.
		return f.events.Add(f.path)
	}
	target, err := filepath.EvalSymlinks(f.path)
	if err != nil {
		return nil // it is being replaced
	}
	return f.events.Add(filepath.Dir(target))
}

// blind makes the File poll more often, without events.
func (f *File) blind(err error) {
	f.log.Warn("file events are not available: polling", "path", f.path, "interval", blindPoll, "error", err)
	if f.events != nil {
		_ = f.events.Close() // it is of no use any more
	}
	f.events, f.poll = nil, min(f.poll, blindPoll)
}

// Run calls changed, from this goroutine, after each change of the content, until ctx ends. A deleted file has not
// changed, except with Options.Gone. A deleted file that is there again has changed, even if its content is the old
// one: a caller may have read it while it was missing. Several changes in quick succession may be reported once.
func (f *File) Run(ctx context.Context, changed func()) {
	defer func() { _ = f.Close() }() // nothing is read from it any more
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

// refresh reads the file and reports a new content.
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

// Files returns the path itself or, if it is a directory, the paths of the YAML files in it, in the order of their
// names. Files whose names begin with a dot are left out, and so are directories.
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
