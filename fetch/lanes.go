package fetch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// lanesWide is how many round trips of one call each are under way before calls
	// share them. Shared ones follow one another.
	lanesWide = 2
	// laneStall is how long without a departure the lanes are waited for: after
	// that they may all be stuck, and a further one is opened.
	laneStall = 2 * vigilPause
	// maxShared is the most calls that share a round trip.
	maxShared = 256
	// minShared is what a call must have left of its deadline to share a round
	// trip, which ends at the earliest deadline of its calls.
	minShared = 5 * time.Millisecond
)

// lanes sends calls. As long as there are few, each has a round trip of its own,
// made by its caller. When all lanes are taken, further calls wait, and whoever is
// first among them sends them all in one pipeline when a lane is free. Those who
// were answered together are about to call again: whoever is the first to do so
// gives way to the others for as long as they come, instead of a round trip of its
// own, and no further lane is opened.
type lanes struct {
	rdb  redis.UniversalClient
	wide int // lanes that are open while there is no crowd
	most int // lanes

	mu          sync.Mutex
	taken       int
	crowd       int       // how many went along on the last round trip
	queued      int       // in line
	departure   time.Time // the last one
	seen        time.Time // departure at the last look of the vigil
	first, last *passenger

	vigil      *vigil
	passengers sync.Pool // of *passenger
	alarms     sync.Pool // of *alarm
}

// passenger is a call that waits for a lane.
type passenger struct {
	ctx     context.Context
	cmd     redis.Cmder
	seat    atomic.Int32 // written with the lock held
	sleeper              // until the seat is driving or arrived
	next    *passenger
}

// Seats of a passenger.
const (
	waiting int32 = iota
	driving       // it is to send what waits
	riding        // it is being sent
	arrived       // it is answered
	left          // its caller stopped waiting
)

// newLanes makes the way to the server. On a Cluster or Ring, where a pipeline
// waits for the slowest of its servers, calls don't share round trips.
func newLanes(rdb redis.UniversalClient, cfg config) lua.Client {
	client, ok := rdb.(*redis.Client)
	if !ok || !cfg.coalesce {
		return rdb
	}
	l := &lanes{rdb: client, wide: lanesWide, most: cfg.concurrency}
	l.vigil = newVigil(l.look)
	l.passengers.New = func() any { return &passenger{sleeper: newSleeper()} }
	return l
}

// Process implements lua.Client. It returns when the call has ended, or unsent
// when ctx ends first.
func (l *lanes) Process(ctx context.Context, cmd redis.Cmder) error {
	l.mu.Lock()
	if l.open() || l.first == nil && l.stuck() {
		l.taken++
		l.departure = time.Now()
		l.mu.Unlock()
		return l.drive(ctx, cmd)
	}
	p := l.passengers.Get().(*passenger)
	p.ctx, p.cmd = ctx, cmd
	p.seat.Store(waiting)
	p.stirred.Store(false)
	if l.first == nil {
		l.first = p
	} else {
		l.last.next = p
	}
	l.last = p
	l.queued++
	l.mu.Unlock()
	l.vigil.begin()
	var err error
	switch seat := l.wait(p); {
	case seat == left:
		return l.unsent(ctx)
	case seat == arrived:
		err = p.cmd.Err()
	case ctx.Err() != nil:
		l.free()
		err = l.unsent(ctx)
	default:
		err = l.drive(p.ctx, p.cmd)
	}
	p.ctx, p.cmd = nil, nil
	l.passengers.Put(p)
	return err
}

// wait waits until a passenger is to drive, has arrived or left.
func (l *lanes) wait(p *passenger) int32 {
	for !p.stirred.Load() {
		<-p.signal
		if seat := p.seat.Load(); seat == driving || seat == arrived {
			return seat
		}
	}
	for {
		select {
		case <-p.signal:
		case <-p.ctx.Done():
			l.mu.Lock()
			if p.seat.Load() == waiting {
				p.seat.Store(left) // it stays in line and is dropped
			}
			l.mu.Unlock()
			if p.seat.Load() == riding {
				<-p.signal
			}
		}
		if seat := p.seat.Load(); seat != waiting && seat != riding {
			return seat
		}
	}
}

// look is that of the vigil: it stirs who waits if nobody has departed since the last
// one, and opens a further lane if all may be stuck.
func (l *lanes) look() bool {
	l.mu.Lock()
	if l.first == nil {
		l.mu.Unlock()
		return false
	}
	if l.departure.Equal(l.seen) {
		for p := l.first; p != nil; p = p.next {
			p.stir()
		}
	}
	l.seen = l.departure
	open := l.stuck()
	if open {
		l.taken++
	}
	l.mu.Unlock()
	if open {
		l.free()
	}
	return true
}

func (l *lanes) unsent(ctx context.Context) error {
	return fmt.Errorf("%w: %w", errUnsent, ctx.Err())
}

// open reports whether a lane is free. The lock is held.
func (l *lanes) open() bool { return l.taken == 0 || l.taken < l.wide && l.crowd == 0 }

// stuck reports whether to open a further lane. The lock is held.
func (l *lanes) stuck() bool {
	return l.taken < l.most && time.Since(l.departure) > laneStall
}

// free gives a lane to the first who waits.
func (l *lanes) free() {
	l.mu.Lock()
	for p := l.first; p != nil; p = l.first {
		l.pop()
		if p.seat.CompareAndSwap(waiting, driving) {
			l.departure = time.Now()
			l.mu.Unlock()
			p.wake()
			return
		}
	}
	l.taken--
	l.mu.Unlock()
}

func (l *lanes) pop() {
	p := l.first
	l.queued--
	l.first, p.next = p.next, nil
	if l.first == nil {
		l.last = nil
	}
}

// drive sends a call and those that wait behind it.
func (l *lanes) drive(driverCtx context.Context, driver redis.Cmder) error {
	defer l.free()
	deadline, _ := driverCtx.Deadline()
	var riders []*passenger
	l.mu.Lock()
	gather(&l.mu, &l.queued, l.crowd)
	for p := l.first; p != nil && len(riders) < maxShared-1; p = l.first {
		if p.seat.Load() == waiting {
			d, ok := p.ctx.Deadline()
			if ok && time.Until(d) < minShared {
				break // it drives itself, or is too late
			}
			deadline = earlier(deadline, d)
			p.seat.Store(riding)
			riders = append(riders, p)
		}
		l.pop()
	}
	l.crowd = len(riders)
	l.mu.Unlock()

	if riders == nil {
		return l.rdb.Process(driverCtx, driver)
	}
	// The riders' calls go even if nobody waits for the driver's any more.
	ctx := newSocketContext(context.WithoutCancel(driverCtx), deadline, &l.alarms)
	defer ctx.release()
	pipe := l.rdb.Pipeline()
	_ = pipe.Process(ctx, driver) // queues
	for _, p := range riders {
		_ = pipe.Process(ctx, p.cmd)
	}
	cmds, err := pipe.Exec(ctx)
	fail(cmds, err)
	err = driver.Err()
	for _, p := range riders {
		p.seat.Store(arrived) // p is its caller's from here on
		p.wake()
	}
	return err
}

// fail has commands fail with the error of their round trip if none of them has one,
// as go-redis leaves them when a server refuses the connection.
func fail(cmds []redis.Cmder, err error) {
	for _, cmd := range cmds {
		if err == nil || cmd.Err() != nil {
			return
		}
	}
	for _, cmd := range cmds {
		cmd.SetErr(err)
	}
}
