package dev

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/fields"
)

// MinKillEvery is the shortest time between two kills: a killed replica has to come back and settle.
const MinKillEvery = 3 * time.Second

// redisVariable tells replicas where the store is: no file on disk has an address with a password.
const redisVariable = "REFILLER_REDIS_URL"

// ErrOptions is returned for options that can't be used.
var ErrOptions = errors.New("dev: bad options")

// Options says what to run and how to show it.
type Options struct {
	// Program is the refiller executable; "run" makes it a replica.
	Program string
	// Environ is the environment as "NAME=value", which replicas get but for what Run decides itself.
	Environ []string
	// Mode of the election.
	Mode config.Mode
	// Redis is the URL of the store; empty means an embedded one.
	Redis string
	// Etcd are the endpoints of etcd; none means an embedded one, if Mode needs it.
	Etcd []string
	// KillEvery is how often the replica that refills is killed, MinKillEvery or more; 0 means never.
	KillEvery time.Duration
	// Duration ends the run; 0 means that only the context does.
	Duration time.Duration
	// Out is what people read.
	Out io.Writer
	// Terminal tells that Out is a terminal: the status is then rewritten in place.
	Terminal bool
	// Color allows colours, on a terminal only.
	Color bool
}

// Validate reports what is wrong with the options, as ErrOptions.
func (o Options) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
	}
	switch {
	case o.Program == "":
		return bad("Program is empty")
	case o.Out == nil:
		return bad("Out is nil")
	case o.KillEvery != 0 && o.KillEvery < MinKillEvery:
		return bad("--kill-leader-every %s: want %s or more, or 0 for never", o.KillEvery, MinKillEvery)
	case o.Duration < 0:
		return bad("--duration %s: want more than 0, or 0 for no end", o.Duration)
	case o.Mode == config.ModeRace && len(o.Etcd) > 0:
		return bad("--etcd goes with --mode etcd: in race mode nobody asks it")
	}
	// The rest is for the configuration to judge.
	text := configText(settings{mode: o.Mode, etcd: o.etcdOr("http://127.0.0.1:1"), listen: "127.0.0.1:0"})
	_, err := config.Load(config.Source{Data: []byte(text), Env: fields.Environment{redisVariable: o.redisOr("redis://127.0.0.1:1")}})
	var problems config.Problems
	if errors.As(err, &problems) {
		names := map[string]string{"redis.url": "--redis: ", "election.endpoints": "--etcd: "}
		p := problems[0]
		for field, flag := range names {
			if len(p.Field) >= len(field) && p.Field[:len(field)] == field {
				return bad("%s%s", flag, p.Msg)
			}
		}
	}
	return err
}

func (o Options) redisOr(embedded string) string {
	if o.Redis != "" {
		return o.Redis
	}
	return embedded
}

func (o Options) etcdOr(embedded string) []string {
	if len(o.Etcd) > 0 {
		return o.Etcd
	}
	return []string{embedded}
}
