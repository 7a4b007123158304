package dev

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
)

// MinKillEvery is the shortest time between two kills. A killed replica needs it to start again and to settle.
const MinKillEvery = 3 * time.Second

// ErrOptions is returned for options that can't be used.
var ErrOptions = errors.New("dev: bad options")

// Options are the options of a run.
type Options struct {
	// Program is the refiller executable. With the argument "run" it is a replica.
	Program string
	// GoRun reports that Program was started by go run. Then the commands that people are asked to type use go run, too.
	GoRun bool
	// Environ is the environment as "NAME=value". Replicas get it, except the variables that Run sets itself.
	Environ []string
	// Duration is the length of the run; 0 means that only the context ends it.
	Duration time.Duration
	// Out is where the output for people goes.
	Out io.Writer
	// Screen describes Out. On a terminal the status is rewritten in place.
	Screen terminal.Screen

	// Mode of the election.
	Mode config.Mode
	// Redis is the URL of the store; empty means an embedded one.
	Redis string
	// Etcd are the endpoints of etcd; none means an embedded one, if Mode needs it.
	Etcd []string
	// KillEvery is the time between two kills of the replica that refills, MinKillEvery or more; 0 means that none is
	// killed.
	KillEvery time.Duration

	// Flows shows a loud user and quiet ones instead of the sample buckets.
	Flows bool

	// Regions are the names of two or more regions that share a pool; nil for one store with sample buckets. Mode, Redis,
	// Etcd and KillEvery are for one store, and the fields below for regions.
	Regions []string
	// Cut is the region to cut off from etcd; empty for none.
	Cut string
	// CutAfter is the time from the start until Cut is cut off. CutFor is the length of the cut; 0 means that it doesn't
	// end.
	CutAfter, CutFor time.Duration
}

// program returns the command with which people start one of the programs.
func (o Options) program(name string) string {
	if o.GoRun {
		return "go run ./cmd/" + name
	}
	return name
}

// Validate reports errors in the options, as ErrOptions.
func (o Options) Validate() error {
	switch {
	case o.Program == "":
		return bad("Program is empty")
	case o.Out == nil:
		return bad("Out is nil")
	case o.Duration < 0:
		return bad("--duration %s: want 0 or more; 0 means until Ctrl-C", o.Duration)
	case o.Flows && o.Regions != nil:
		return bad("--flows can't be used with --regions")
	case o.Regions != nil && (len(o.Regions) < 2 || len(o.Regions) > maxRegions):
		return bad("--regions %s: want 2 to %d names, such as eu,us,ap", strings.Join(o.Regions, ","), maxRegions)
	case o.Cut != "" && !slices.Contains(o.Regions, o.Cut):
		return bad("--cut %s: want one of the regions %s", o.Cut, strings.Join(o.Regions, ","))
	case o.CutAfter < 0 || o.CutFor < 0:
		return bad("--cut-after %s, --cut-for %s: want 0 or more", o.CutAfter, o.CutFor)
	case o.KillEvery != 0 && o.KillEvery < MinKillEvery:
		return bad("--kill-leader-every %s: want %s or more, or 0 for never", o.KillEvery, MinKillEvery)
	case o.Mode == config.ModeRace && len(o.Etcd) > 0:
		return bad("--etcd requires --mode etcd")
	}
	for i, name := range o.names() {
		if slices.Contains(o.names()[i+1:], name) {
			return bad("--regions: %q is there twice", name)
		}
		if err := o.validateRegion(name); err != nil {
			return err
		}
	}
	return nil
}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
}

// validateRegion checks the addresses, or the region's name, by reading a configuration with them.
func (o Options) validateRegion(name string) error {
	etcd := o.Etcd
	if len(etcd) == 0 {
		etcd = []string{"http://127.0.0.1:1"}
	}
	_, err := o.config(name, cmp.Or(o.Redis, "redis://127.0.0.1:1"), etcd, nil)
	var problems config.Problems
	if !errors.As(err, &problems) {
		return err
	}
	for field, flag := range map[string]string{"redis.url": "--redis", "election.endpoints": "--etcd"} {
		if strings.HasPrefix(problems[0].Field, field) {
			return bad("%s: %s", flag, problems[0].Msg)
		}
	}
	if name == "" {
		return err
	}
	return bad("--regions: %s", problems[0].Msg)
}

// names returns the names of the regions. A single region has an empty name.
func (o Options) names() []string {
	if o.Regions == nil {
		return []string{""}
	}
	return o.Regions
}
