package schedule

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/lua"
)

//go:embed reserve.lua
var reserveSource string

//go:embed cancel.lua
var cancelSource string

var (
	reserveScript = lua.NewScript("schedule: reserve", reserveSource)
	cancelScript  = lua.NewScript("schedule: cancel", cancelSource)
)

// shared keeps schedules in Redis.
type shared struct {
	rdb    *engine.Commands
	config Config
}

func (s shared) name(key string) string {
	return decide.Rule{Suffix: "sched", Name: s.config.Name}.Key(key)
}

func (s shared) reserve(ctx context.Context, key string, c call) (answer, error) {
	what, near := 1, c.at
	if c.check {
		what = 0
	}
	if near == 0 {
		near = c.near
	}
	args := []any{c.id, c.at, c.n, what, s.config.horizon().Microseconds(), s.config.longest().Microseconds()}
	for _, w := range s.config.Windows {
		begin, end := int64(0), int64(0)
		if w.Per.Valid() {
			begin, end = w.span(near)
		}
		args = append(args, w.Limit, w.Length.Microseconds(), begin, end)
	}
	r, err := reserveScript.Run(ctx, s.rdb, []string{s.name(key)}, args...)
	if err != nil {
		return answer{}, decide.Unavailable(err)
	}
	a := answer{code: r.Int()}
	switch a.code {
	case codeMalformed:
		if err := r.End(); err != nil {
			return answer{}, err
		}
		return answer{}, decide.Malformed(key, s.name(key))
	case codeDone, codeRepeated:
		a.now = r.Int()
		a.left = r.Int()
		a.until = r.Int()
	case codeDenied:
		a.now = r.Int()
		a.next = r.Int()
		a.sure = r.Int() == 1
		a.left = r.Int()
		for r.More() {
			a.denied = append(a.denied, r.Int())
		}
	default:
		a.now = r.Int()
	}
	return a, r.End()
}

func (s shared) cancel(ctx context.Context, key string, c call, passed bool) (bool, error) {
	even := 0
	if passed {
		even = 1
	}
	r, err := cancelScript.Run(ctx, s.rdb, []string{s.name(key)}, c.id, c.n, even)
	if err != nil {
		return false, decide.Unavailable(err)
	}
	code := r.Int()
	if err := r.End(); err != nil {
		return false, err
	}
	switch code {
	case codeDone:
		return true, nil
	case codeDenied:
		return false, nil
	case codeMalformed:
		return false, decide.Malformed(key, s.name(key))
	}
	return false, fmt.Errorf("%w: code %d", lua.ErrBadReply, code)
}

func (s shared) list(ctx context.Context, key string, from, to, most int64) ([]Entry, error) {
	before := "(" + strconv.FormatInt(to, 10)
	cmd := redis.NewZSliceCmd(ctx, "zrange", s.name(key), from, before, "byscore", "limit", 0, most, "withscores")
	err := s.rdb.Process(ctx, cmd)
	if redis.HasErrorPrefix(err, "WRONGTYPE") {
		return nil, decide.Malformed(key, s.name(key))
	}
	if err != nil {
		return nil, decide.Unavailable(fmt.Errorf("schedule: list: %w", err))
	}
	found := cmd.Val()
	entries := make([]Entry, len(found))
	for i, z := range found {
		id, ok := z.Member.(string)
		if !ok {
			return nil, fmt.Errorf("%w: %T for an id", lua.ErrBadReply, z.Member)
		}
		entries[i] = Entry{ID: id, At: time.UnixMicro(int64(z.Score))}
	}
	return entries, nil
}

func (s shared) reset(ctx context.Context, key string) error {
	return decide.Unlink(ctx, s.rdb, s.name(key))
}
