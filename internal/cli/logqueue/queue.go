package logqueue

import (
	"bytes"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

const (
	// maxQueued bounds the messages in a queue, in bytes. At 200 bytes each, these are about 5,000 messages.
	maxQueued = 1 << 20
	// flushTime is the longest time for which Flush waits. A program that ends must not wait for the reader of its log.
	flushTime = time.Second
)

// Queue is the queue of a log. It is safe for concurrent use.
type Queue struct {
	out io.Writer

	mu       sync.Mutex
	messages []message
	size     int           // of the messages, in bytes
	dropped  int           // messages that were dropped since the last notice
	idle     chan struct{} // closed while no goroutine writes messages

	// notices formats notices of dropped messages into notice.
	notices hclog.Logger
	notice  bytes.Buffer
}

// message is a formatted message, or a notice of dropped messages. If it can't be written, count messages are lost.
type message struct {
	text  []byte
	count int
}

// New returns a logger as hclog.New does, and the queue in front of options.Output.
func New(options hclog.LoggerOptions) (hclog.Logger, *Queue) {
	q := &Queue{out: options.Output, idle: make(chan struct{})}
	close(q.idle)
	notices := options
	notices.Output = &q.notice
	notices.Level = hclog.Warn
	q.notices = hclog.New(&notices)
	options.Output = q
	return hclog.New(&options), q
}

// Write implements io.Writer. It puts a message into the queue, or drops it if the queue is full. It never blocks.
func (q *Queue) Write(text []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.size+len(text) > maxQueued {
		q.dropped++
		return len(text), nil
	}
	if q.dropped > 0 {
		q.addNotice()
	}
	q.add(message{bytes.Clone(text), 1})
	select {
	case <-q.idle:
		q.idle = make(chan struct{})
		go q.run()
	default:
	}
	return len(text), nil
}

// Flush waits until the queue is empty, but for at most a second.
func (q *Queue) Flush() {
	q.mu.Lock()
	idle := q.idle
	q.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(flushTime):
	}
}

// run writes messages until the queue is empty. Write starts it. If a write blocks, run ends with the process.
func (q *Queue) run() {
	lost := 0
	for {
		m, ok := q.next(lost)
		if !ok {
			return
		}
		lost = 0
		if _, err := q.out.Write(m.text); err != nil {
			lost = m.count
		}
	}
}

// next removes a message from the queue and returns it. lost is the number of messages that the last write lost. Only
// after a write that lost none, the last message is a notice of dropped messages. Otherwise run would try for ever.
func (q *Queue) next(lost int) (m message, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropped += lost
	if len(q.messages) == 0 && q.dropped > 0 && lost == 0 {
		q.addNotice()
	}
	if len(q.messages) == 0 {
		q.messages = nil
		close(q.idle)
		return message{}, false
	}
	m = q.messages[0]
	q.messages[0] = message{} // so that its text can be collected
	q.messages = q.messages[1:]
	q.size -= len(m.text)
	return m, true
}

func (q *Queue) add(m message) {
	q.messages = append(q.messages, m)
	q.size += len(m.text)
}

// addNotice adds a notice of the dropped messages to the queue.
func (q *Queue) addNotice() {
	q.notices.Warn("log messages were dropped, because they could not be written", "dropped", q.dropped)
	q.add(message{bytes.Clone(q.notice.Bytes()), q.dropped})
	q.notice.Reset()
	q.dropped = 0
}
