package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Speed is the number of seconds of the log that are replayed in one second.
type Speed float64

// Max is the speed of a replay that never waits.
const Max Speed = 0

// These are the limits of the other speeds.
const (
	minSpeed = 0.001
	maxSpeed = 1e6
)

// ErrSpeed is returned for a speed that can't be read or is out of range.
var ErrSpeed = errors.New("replay: bad speed")

// ParseSpeed reads "max", or a factor such as 1x, 0.5x or 100x.
func ParseSpeed(s string) (Speed, error) {
	if s == "max" {
		return Max, nil
	}
	number, found := strings.CutSuffix(s, "x")
	f, err := strconv.ParseFloat(number, 64)
	if !found || err != nil || !(f >= minSpeed && f <= maxSpeed) { // this form of the condition refuses NaN
		return 0, fmt.Errorf("%w %q: want max, or a factor from %gx to %.0fx such as 1x or 100x", ErrSpeed, s, minSpeed,
			maxSpeed)
	}
	return Speed(f), nil
}

// String formats the speed in a form that ParseSpeed reads.
func (s Speed) String() string {
	if s == Max {
		return "max"
	}
	return strconv.FormatFloat(float64(s), 'f', -1, 64) + "x"
}

// pacer makes the log's clock run at a speed. It computes each instant from the first one, so delays don't add up.
type pacer struct {
	speed Speed
	first int64 // of the log, Unix µs
	start time.Time
	timer *time.Timer
}

// wait waits until the log's clock reaches at.
func (p *pacer) wait(ctx context.Context, at int64) error {
	if p.speed == Max {
		return ctx.Err()
	}
	if p.timer == nil {
		p.first, p.start = at, time.Now()
		p.timer = time.NewTimer(0)
	}
	elapsed := time.Duration(min(float64(at-p.first)*1e3/float64(p.speed), math.MaxInt64/2))
	ahead := elapsed - time.Since(p.start)
	if ahead <= 0 {
		return ctx.Err()
	}
	p.timer.Reset(ahead)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-p.timer.C:
		return nil
	}
}

func (p *pacer) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
}
