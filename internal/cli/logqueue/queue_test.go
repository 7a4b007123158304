package logqueue

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
)

// reader is the reader of a log. While blocked is open, writes block. While failing is set, they fail.
type reader struct {
	blocked chan struct{}
	failing bool
	text    bytes.Buffer
}

func newReader() *reader {
	r := &reader{blocked: make(chan struct{})}
	close(r.blocked)
	return r
}

func (r *reader) Write(p []byte) (int, error) {
	<-r.blocked
	if r.failing {
		return 0, errors.New("no reader")
	}
	return r.text.Write(p)
}

// lines returns what was read, as messages of JSON.
func (r *reader) lines(t *testing.T) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(r.text.String()) {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		all = append(all, m)
	}
	return all
}

func open(r *reader) (hclog.Logger, *Queue) {
	return New(hclog.LoggerOptions{Name: "test", Output: r, JSONFormat: true, Level: hclog.Info})
}

func TestMessagesAreWrittenInTheirOrder(t *testing.T) {
	r := newReader()
	log, queue := open(r)
	queue.Flush()
	for i := range 3000 {
		log.Info("message", "number", i)
		if i%1000 == 999 {
			queue.Flush()
			require.Len(t, r.lines(t), i+1)
		}
	}
	for i, m := range r.lines(t) {
		require.EqualValues(t, i, m["number"])
	}
}

func TestMessagesAreDroppedWhileTheQueueIsFull(t *testing.T) {
	r := newReader()
	r.blocked = make(chan struct{})
	log, queue := open(r)
	const all = 3000
	for i := range all {
		log.Info("message", "number", i, "text", strings.Repeat("x", 1000))
	}
	require.Less(t, queue.size, maxQueued+1)
	close(r.blocked)
	queue.Flush()
	lines := r.lines(t)
	kept := len(lines) - 1
	require.Greater(t, kept, 900)
	for i, m := range lines[:kept] {
		require.EqualValues(t, i, m["number"])
	}
	notice := lines[kept]
	require.Equal(t, "log messages were dropped, because they could not be written", notice["@message"])
	require.Equal(t, "warn", notice["@level"])
	require.Equal(t, "test", notice["@module"])
	require.EqualValues(t, all-kept, notice["dropped"])

	log.Info("next")
	queue.Flush()
	lines = r.lines(t)
	require.Len(t, lines, kept+2)
	require.Equal(t, "next", lines[kept+1]["@message"])
}

func TestMessagesThatCannotBeWrittenAreCounted(t *testing.T) {
	r := newReader()
	log, queue := open(r)
	r.failing = true
	for i := range 5 {
		log.Info("lost", "number", i)
		queue.Flush()
	}
	r.failing = false
	log.Info("next")
	queue.Flush()
	lines := r.lines(t)
	require.Len(t, lines, 2)
	require.EqualValues(t, 5, lines[0]["dropped"])
	require.Equal(t, "next", lines[1]["@message"])
}

func TestFlushDoesNotWaitForAReaderThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{blocked: make(chan struct{})}
		log, queue := open(r)
		log.Info("message")
		began := time.Now()
		queue.Flush()
		require.Equal(t, flushTime, time.Since(began))
		close(r.blocked)
		queue.Flush()
		require.Equal(t, flushTime, time.Since(began))
		require.Len(t, r.lines(t), 1)
	})
}

func TestMessagesOfManyGoroutinesAreAllWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReader()
		log, queue := open(r)
		for i := range 50 {
			go func() { log.Info(fmt.Sprint(i)) }()
		}
		synctest.Wait()
		queue.Flush()
		require.Len(t, r.lines(t), 50)
	})
}
