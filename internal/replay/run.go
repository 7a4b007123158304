package replay

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/tokenrefill/refiller/internal/replay/accesslog"
	"github.com/tokenrefill/refiller/policy"
)

// Log is a source of requests. [accesslog.Reader] implements it.
type Log interface {
	Next() (accesslog.Record, error) // io.EOF after the last
	Unparsed() accesslog.Unparsed
}

// Config has the policy of a replay, and its options.
type Config struct {
	Capacity int64 // of each key's bucket, 1 to policy.MaxTokens
	Rate     policy.Rate
	Speed    Speed
	Top      int // number of keys that the report lists, at least 0
	// Progress is called before each request, from the goroutine of Run. It gets the totals so far, in which Keys and
	// Unparsed are 0. From the second request on it also gets the log's clock in Unix µs. It may be nil.
	Progress func(Total, int64)
}

// ErrBackwards is returned for a log that begins with its newest request. Such a log has more requests that are earlier
// than the previous one than requests that are later. Its report is useless, because its buckets earned no credit.
var ErrBackwards = errors.New("replay: the log begins with its newest request")

// Run replays the log to its end. If the log fails or ctx ends before that, the report covers the requests so far, and
// the error has the reason. The memory in use grows by some hundred bytes for each key.
func Run(ctx context.Context, log Log, cfg Config) (Report, error) {
	buckets, err := NewBuckets(cfg.Capacity, cfg.Rate)
	if err != nil {
		return Report{}, err
	}
	t := newOutcome()
	p := &pacer{speed: cfg.Speed}
	defer p.stop()
	for {
		err = next(ctx, log, buckets, t, p, cfg.Progress)
		if err != nil {
			break
		}
	}
	report := t.report(cfg.Top, log.Unparsed())
	if errors.Is(err, io.EOF) && t.fell > t.rose {
		return report, ErrBackwards
	}
	if errors.Is(err, io.EOF) {
		return report, nil
	}
	return report, fmt.Errorf("replay: stopped after %d requests: %w", report.Total.Requests, err)
}

// next replays one request.
func next(ctx context.Context, log Log, buckets *Buckets, t *outcome, p *pacer, progress func(Total, int64)) error {
	record, err := log.Next()
	if err != nil {
		return err
	}
	if progress != nil {
		progress(t.total, t.clock)
	}
	// A request is counted only when its time has come.
	if err := p.wait(ctx, max(record.Time, t.clock)); err != nil {
		return err
	}
	t.count(record.Key, record.Time, !buckets.Take(record.Key, record.Time).OK)
	return nil
}
