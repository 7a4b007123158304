package limits

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// ErrFile is returned for a file of limits with errors. The error names the file and each wrong field.
var ErrFile = errors.New("limits: bad file")

// file is the structure of a file of limits.
type file struct {
	Limits []fileLimit `yaml:"limits"`
}

// fileLimit has a name and one of the other fields.
type fileLimit struct {
	Name     string        `yaml:"name"`
	Bucket   *fileBucket   `yaml:"bucket"`
	Lazy     *fileLazy     `yaml:"lazy"`
	Window   *fileWindow   `yaml:"window"`
	Pacing   *filePacing   `yaml:"pacing"`
	Schedule *fileSchedule `yaml:"schedule"`
	All      []fileLimit   `yaml:"all"`
}

type fileBucket struct {
	Prefix string `yaml:"prefix"`
	Key    string `yaml:"key"`
	Flow   string `yaml:"flow"`
}

// keyOfFlow is the text in a limit's flow that the key of a request replaces.
const keyOfFlow = "{key}"

type fileLazy struct {
	Capacity call.Number `yaml:"capacity"`
	Rate     string      `yaml:"rate"`
}

type fileWindow struct {
	Limit   call.Number `yaml:"limit"`
	Length  string      `yaml:"length"`
	Per     string      `yaml:"per"`
	Zone    string      `yaml:"zone"`
	Sliding bool        `yaml:"sliding"`
}

type filePacing struct {
	Rate    string `yaml:"rate"`
	MaxWait string `yaml:"max_wait"`
}

type fileSchedule struct {
	Windows []fileScheduleWindow `yaml:"windows"`
	Zone    string               `yaml:"zone"`
	Horizon string               `yaml:"horizon"`
}

type fileScheduleWindow struct {
	Name   string      `yaml:"name"`
	Limit  call.Number `yaml:"limit"`
	Length string      `yaml:"length"`
	Per    string      `yaml:"per"`
	Zone   string      `yaml:"zone"`
}

// Parse parses a file of limits. name is for error messages. If rdb is nil, the limits are checked but can't be used.
func Parse(name string, data []byte, rdb redis.UniversalClient, buckets *fetch.Client) (*Set, error) {
	p := parser{file: name, rdb: rdb, buckets: buckets, keys: make(map[string]bool)}
	var f file
	s := &Set{limits: make(map[string]*Limit)}
	if err := call.DecodeYAML(data, &f); err != nil {
		p.bad("", err)
	} else if len(f.Limits) == 0 {
		p.bad("limits", errors.New("it is missing or empty"))
	}
	for i, fl := range f.Limits {
		at := fmt.Sprintf("limits[%d]", i)
		switch {
		case fl.Name == "":
			p.bad(at+".name", errors.New("it is missing"))
		case s.limits[fl.Name] != nil:
			p.bad(at+".name", fmt.Errorf("%q is the name of two limits", fl.Name))
		default:
			s.limits[fl.Name] = p.limit(at, fl)
			s.names = append(s.names, fl.Name)
		}
	}
	if len(p.errs) > 0 {
		return nil, errors.Join(p.errs...)
	}
	return s, nil
}

// parser parses a file and collects its errors.
type parser struct {
	file    string
	rdb     redis.UniversalClient
	buckets *fetch.Client
	keys    map[string]bool // names that are taken by lazy buckets, windows and pacing, also as parts of all
	errs    []error
}

func (p *parser) bad(field string, err error) {
	where := p.file
	if field != "" {
		where += ": " + field
	}
	p.errs = append(p.errs, fmt.Errorf("%w: %s: %w", ErrFile, where, err))
}

// limit makes one limit. It collects errors.
func (p *parser) limit(at string, f fileLimit) *Limit {
	l := &Limit{name: f.Name}
	kinds := 0
	for _, there := range []bool{f.Bucket != nil, f.Lazy != nil, f.Window != nil, f.Pacing != nil, f.Schedule != nil,
		f.All != nil} {
		if there {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		p.bad(at, errors.New("want one of bucket, lazy, window, pacing, schedule and all"))
	case f.Bucket != nil:
		if err := limit.CheckName(f.Name); err != nil {
			p.bad(at, err)
		}
		p.bucket(at+".bucket", f.Bucket)
		l.limiter = p.buckets
		l.prefix = f.Bucket.Prefix
		l.bucket = f.Bucket.Key
		l.flow = f.Bucket.Flow
	case f.Schedule != nil:
		cfg := p.schedule(at+".schedule", f)
		if err := cfg.Validate(); err != nil {
			p.bad(at+".schedule", err)
		} else if p.rdb != nil {
			l.schedule = made(p, at, cfg, schedule.New)
			l.limiter = l.schedule
		}
	case f.All != nil:
		var all []limit.Config
		for i, one := range f.All {
			where := fmt.Sprintf("%s.all[%d]", at, i)
			if c := p.config(where, one, f.Name+"."+one.Name); c != nil {
				all = append(all, c)
				l.wait = max(l.wait, wait(c))
			}
		}
		if len(all) == len(f.All) {
			l.limiter = made(p, at+".all", all, func(rdb redis.UniversalClient, all []limit.Config) (*limit.Many, error) {
				if rdb == nil { // the limit is only checked
					return limit.NewManyLocal(time.Now, all...)
				}
				return limit.NewMany(rdb, all...)
			})
		}
	default:
		p.single(at, l, p.config(at, f, f.Name))
	}
	return l
}

// bucket checks the names of a limit's buckets and flows.
func (p *parser) bucket(at string, f *fileBucket) {
	if err := lua.CheckKey(f.Prefix + "k"); err != nil {
		p.bad(at+".prefix", err)
	}
	if f.Key != "" {
		if err := lua.CheckKey(f.Key); err != nil {
			p.bad(at+".key", err)
		}
		if f.Prefix != "" {
			p.bad(at, errors.New("want either prefix or key"))
		}
	}
	if f.Flow == "" {
		return
	}
	if f.Key == "" {
		p.bad(at+".flow", errors.New("it needs the field key, which names the bucket of the flows"))
	}
	text := strings.ReplaceAll(f.Flow, keyOfFlow, "k")
	if err := policy.CheckFlow(text); err != nil {
		p.bad(at+".flow", err)
	}
	if text == f.Flow || strings.ContainsAny(text, "{}") {
		p.bad(at+".flow", fmt.Errorf("%q: want a text that contains {key}, and no other braces", f.Flow))
	}
}

// single makes the limiter of one config.
func (p *parser) single(at string, l *Limit, c limit.Config) {
	if c == nil || p.rdb == nil {
		return
	}
	l.wait = wait(c)
	switch c := c.(type) {
	case lazy.Config:
		l.limiter = made(p, at, c, lazy.New)
	case window.Config:
		l.limiter = made(p, at, c, window.New)
	case pacing.Config:
		l.limiter = made(p, at, c, pacing.New)
	default:
		p.bad(at, fmt.Errorf("the sidecar doesn't support limits of the type %T", c))
	}
}

// wait returns the longest time that a config makes a caller wait.
func wait(c limit.Config) time.Duration {
	queue, _ := c.(pacing.Config)
	return queue.MaxWait
}

func made[C, L any](p *parser, at string, c C, by func(redis.UniversalClient, C) (L, error)) L {
	l, err := by(p.rdb, c)
	if err != nil {
		p.bad(at, err)
	}
	return l
}

// config reads a lazy bucket, a window or pacing. Their names must differ. config returns nil if there is an error.
func (p *parser) config(at string, f fileLimit, name string) limit.Config {
	var c limit.Config
	switch {
	case f.Lazy != nil:
		at += ".lazy"
		c = lazy.Config{Name: name, Capacity: p.whole(at+".capacity", f.Lazy.Capacity),
			Rate: p.rate(at+".rate", f.Lazy.Rate)}
	case f.Window != nil:
		at += ".window"
		w := window.Config{Name: name, Limit: p.whole(at+".limit", f.Window.Limit),
			Window: p.duration(at+".length", f.Window.Length)}
		w.Per, w.In = p.calendar(at, f.Window.Per, f.Window.Zone)
		if f.Window.Sliding {
			w.Kind = window.Sliding
		}
		c = w
	case f.Pacing != nil:
		at += ".pacing"
		c = pacing.Config{Name: name, Rate: p.rate(at+".rate", f.Pacing.Rate),
			MaxWait: p.duration(at+".max_wait", f.Pacing.MaxWait)}
	default:
		p.bad(at, errors.New("want one of lazy, window and pacing"))
		return nil
	}
	if err := c.Validate(); err != nil {
		p.bad(at, err)
		return nil
	}
	if p.keys[name] {
		p.bad(at, fmt.Errorf("another limit already has the name %q; within all, names have the form PARENT.NAME", name))
		return nil
	}
	p.keys[name] = true
	return c
}

func (p *parser) schedule(at string, f fileLimit) schedule.Config {
	s := f.Schedule
	c := schedule.Config{Name: f.Name, Horizon: p.duration(at+".horizon", s.Horizon)}
	for i, w := range s.Windows {
		where := fmt.Sprintf("%s.windows[%d]", at, i)
		one := schedule.Window{Name: w.Name, Limit: p.whole(where+".limit", w.Limit),
			Length: p.duration(where+".length", w.Length)}
		zone := w.Zone
		if zone == "" && w.Per != "" {
			zone = s.Zone
		}
		one.Per, one.In = p.calendar(where, w.Per, zone)
		c.Windows = append(c.Windows, one)
	}
	return c
}

// calendar reads a unit of the calendar and its time zone. An empty zone is UTC. Without a unit, calendar returns nil.
// If the unit can't be read, it records an error of the file and returns an arbitrary unit.
func (p *parser) calendar(at, per, zone string) (calendar.Unit, *time.Location) {
	if per == "" {
		if zone != "" {
			p.bad(at+".zone", errors.New("it needs the field per"))
		}
		return 0, nil
	}
	unit, err := calendar.Parse(per)
	if err != nil {
		p.bad(at+".per", err)
		unit = calendar.Day
	}
	in, err := time.LoadLocation(zone)
	if err != nil || strings.EqualFold(zone, "local") {
		p.bad(at+".zone", fmt.Errorf("%q is not a time zone, such as Europe/Berlin", zone))
	}
	return unit, in
}

// whole reads a whole number. If it can't be read, whole records an error of the file and returns an arbitrary number.
func (p *parser) whole(at string, n call.Number) int64 {
	v, err := n.Read(fields.Whole())
	if err != nil {
		p.bad(at, err)
		return 1
	}
	return v
}

// rate reads a rate. If it can't be read, rate records an error of the file and returns an arbitrary rate.
func (p *parser) rate(at, s string) policy.Rate {
	if s == "" {
		p.bad(at, errors.New("it is missing"))
		return policy.PerSecond(1)
	}
	r, err := policy.ParseRate(s)
	if err != nil {
		p.bad(at, err)
		return policy.PerSecond(1)
	}
	return r
}

// duration reads a length of time. It returns 0 if there is none.
func (p *parser) duration(at, s string) time.Duration {
	if s == "" {
		return 0
	}
	d, err := policy.ParseDuration(s)
	if err != nil {
		p.bad(at, err)
	}
	return d
}
