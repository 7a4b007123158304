package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"

	"github.com/tokenrefill/refiller/fetch"
)

// charge is what a request has taken.
type charge struct {
	*gateway
	ctx              context.Context // of the request, and goes on when its client has gone
	requests         []fetch.Request
	results          []fetch.Result
	prompt, estimate int64
}

type chargeKey struct{}

func chargeOf(ctx context.Context) *charge {
	c, _ := ctx.Value(chargeKey{}).(*charge)
	return c
}

// settle gives back what was not used of the estimate, or takes what was used beyond it, as far as it is there.
func (c *charge) settle(used int64) {
	for i, r := range c.results {
		key, err := c.requests[i].Key, error(nil)
		if rest := c.estimate - used; rest > 0 {
			r.Taken = rest
			err = c.client.Undo(c.ctx, key, r)
		} else if rest < 0 {
			_, err = c.client.TakeUpTo(c.ctx, key, -rest)
		}
		if err != nil {
			c.log.Error("not settled", "bucket", key, "used", used, "estimate", c.estimate, "error", err)
		}
	}
}

// meter counts the tokens of a response while it passes, and settles when that has ended, for whatever reason.
type meter struct {
	io.ReadCloser
	charge *charge
	ok     bool   // the model answers
	line   []byte // read so far
	deltas int64  // pieces of text, which are a token each
	total  int64  // said by the model at the end; 0: it has not
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.line = append(m.line, p[:n]...)
	for {
		line, rest, whole := bytes.Cut(m.line, []byte("\n"))
		if !whole {
			return n, err
		}
		m.count(line)
		m.line = rest
	}
}

// count reads a line of the stream: an event, or nothing of interest.
func (m *meter) count(line []byte) {
	data, _ := bytes.CutPrefix(line, []byte("data:"))
	var event struct {
		Choices []json.RawMessage
		Usage   struct {
			Total int64 `json:"total_tokens"`
		}
	}
	if json.Unmarshal(data, &event) == nil {
		m.deltas += int64(len(event.Choices))
		m.total = max(m.total, event.Usage.Total)
	}
}

func (m *meter) Close() error {
	m.count(m.line) // an answer that is no stream may end without a line's end
	switch {
	case !m.ok:
		m.charge.settle(0)
	case m.total > 0:
		m.charge.settle(m.total)
	default: // the client has gone, or the model's stream broke
		m.charge.settle(m.charge.prompt + m.deltas)
	}
	return m.ReadCloser.Close()
}
