package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/policy"
)

// charge has the reservations of a request.
type charge struct {
	*gateway
	ctx              context.Context // the context of the request, but not cancelled when the client disconnects
	held             []*fetch.Reservation
	prompt, estimate int64
}

type chargeKey struct{}

func chargeOf(ctx context.Context) *charge {
	c, _ := ctx.Value(chargeKey{}).(*charge)
	return c
}

// reserve reserves the estimate in all budgets with these keys, or in none of them. If a budget denies, reserve returns
// the denied reservation.
func (c *charge) reserve(ctx context.Context, keys ...string) (denied *fetch.Reservation, err error) {
	for _, key := range keys {
		r, err := c.client.Reserve(ctx, key, c.estimate, c.longest, fetch.WithOverrun(policy.OverrunDebt))
		if err != nil || !r.OK {
			c.settle(0)
			return r, err
		}
		c.held = append(c.held, r)
	}
	return nil, nil
}

// settle settles the reservations. Unused tokens of the estimate are returned to the budgets. Tokens that were used
// beyond the estimate are taken from the budgets. If a budget lacks some of these, it owes them.
func (c *charge) settle(used int64) {
	for _, r := range c.held {
		if _, err := r.Settle(c.ctx, used); err != nil {
			c.log.Error("not settled", "budget", r.Key, "used", used, "estimate", c.estimate, "error", err)
		}
	}
}

// meter counts the tokens of a response while the response is forwarded. It settles the reservations when the response
// has ended, for whatever reason.
type meter struct {
	io.ReadCloser
	charge *charge
	ok     bool   // the model answered with status 200
	line   []byte // the part of the current line that was read
	deltas int64  // pieces of text; each counts as a token
	total  int64  // number of tokens that the model sends at the end; 0 before
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

// count counts the tokens in a line of the stream. It ignores lines that aren't events.
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
	m.count(m.line) // the last line may lack a line feed if the answer isn't a stream
	switch {
	case !m.ok:
		m.charge.settle(0)
	case m.total > 0:
		m.charge.settle(m.total)
	default: // the client has disconnected, or the model's stream broke
		m.charge.settle(m.charge.prompt + m.deltas)
	}
	return m.ReadCloser.Close()
}
