package httplimit

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/redisclient"
)

// Abuse is a denied request.
type Abuse struct {
	At       time.Time // on the server's clock
	Key      string
	IP       string
	Method   string // its first 32 bytes
	Path     string // its first 512 bytes
	DeniedBy []string
}

// AbuseLog keeps the latest denials in a Redis stream, for all replicas together. Recording never blocks a request. If
// denials come faster than Redis stores them, some are dropped and counted.
type AbuseLog struct {
	rdb     redis.UniversalClient
	stream  string
	most    int64
	queue   chan Abuse
	dropped atomic.Int64
}

const (
	abuseQueue   = 1024
	abuseTimeout = time.Second
	maxPath      = 512 // bytes
	maxMethod    = 32  // bytes
)

// NewAbuseLog makes an AbuseLog that keeps the latest denials in the Redis stream whose key is stream. It keeps about
// most denials; most is 1 to 1,000,000. Denials are written only while Run is running.
func NewAbuseLog(rdb redis.UniversalClient, stream string, most int64) (*AbuseLog, error) {
	switch {
	case redisclient.IsNil(rdb):
		return nil, fmt.Errorf("%w: the redis client is nil", ErrConfig)
	case stream == "":
		return nil, fmt.Errorf("%w: stream: it is empty", ErrConfig)
	case most < 1 || most > 1_000_000:
		return nil, fmt.Errorf("%w: most: %d is not from 1 to 1000000", ErrConfig, most)
	}
	return &AbuseLog{rdb: rdb, stream: stream, most: most, queue: make(chan Abuse, abuseQueue)}, nil
}

// Record queues a denial. It can be the OnLimit of a Config, and never blocks.
func (l *AbuseLog) Record(r Request, d Decision) {
	ip := ""
	if r.IP.IsValid() {
		ip = r.IP.String()
	}
	a := Abuse{
		Key: d.Key, IP: ip, Method: cut(r.Method, maxMethod), Path: cut(r.URL.Path, maxPath), DeniedBy: d.DeniedBy,
	}
	select {
	case l.queue <- a:
	default:
		l.dropped.Add(1)
	}
}

// cut returns the first most bytes of a text, because a client may send one of any length.
func cut(s string, most int) string { return s[:min(len(s), most)] }

// Dropped returns the number of denials that were not kept.
func (l *AbuseLog) Dropped() int64 { return l.dropped.Load() }

// Run writes the recorded denials until ctx ends, and then those that are left in the queue, for at most a second. It
// returns nil. A denial that can't be written counts as dropped.
func (l *AbuseLog) Run(ctx context.Context) error {
	// All writes after the end of ctx share one timeout, because a shutdown waits for them.
	writing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(abuseTimeout, cancel) })()
	for {
		select {
		case a := <-l.queue:
			l.write(writing, a)
		case <-ctx.Done():
			for {
				select {
				case a := <-l.queue:
					l.write(writing, a)
				default:
					return nil
				}
			}
		}
	}
}

func (l *AbuseLog) write(ctx context.Context, a Abuse) {
	ctx, cancel := context.WithTimeout(ctx, abuseTimeout)
	defer cancel()
	err := l.rdb.XAdd(ctx, &redis.XAddArgs{Stream: l.stream, MaxLen: l.most, Approx: true, Values: []string{
		"key", a.Key, "ip", a.IP, "method", a.Method, "path", a.Path, "by", strings.Join(a.DeniedBy, ","),
	}}).Err()
	if err != nil {
		l.dropped.Add(1)
	}
}

// Latest returns the latest n denials, the last one first; n is at least 1.
func (l *AbuseLog) Latest(ctx context.Context, n int64) ([]Abuse, error) {
	if n < 1 {
		return nil, fmt.Errorf("%w: %d denials; want at least 1", ErrConfig, n)
	}
	messages, err := l.rdb.XRevRangeN(ctx, l.stream, "+", "-", n).Result()
	if err != nil {
		return nil, fmt.Errorf("httplimit: read the abuse log: %w", err)
	}
	abuses := make([]Abuse, len(messages))
	for i, m := range messages {
		field := func(name string) string {
			s, _ := m.Values[name].(string)
			return s
		}
		ms, _, _ := strings.Cut(m.ID, "-")
		at, err := strconv.ParseInt(ms, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("httplimit: read the abuse log: id %q: %w", m.ID, err)
		}
		abuses[i] = Abuse{At: time.UnixMilli(at), Key: field("key"), IP: field("ip"), Method: field("method"),
			Path: field("path")}
		if by := field("by"); by != "" {
			abuses[i].DeniedBy = strings.Split(by, ",")
		}
	}
	return abuses, nil
}
