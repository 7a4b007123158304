package pool

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// watchdog compares a region's clock with this process' monotonic one. A grant
// ends on the region's clock, so one that stands still or runs slow would
// stretch it; the script can't see that, two answers can. A clock that runs fast only ends grants early.
type watchdog struct {
	// Of one era, oldest first: those within the lease, which see a clock that goes wrong little by little, and the
	// last one before, which sees what happened while the server was away.
	readings []reading
	era      int64
	wrong    bool // so a grant of that era may outlast its end
}

// reading is one look at the region's clock.
type reading struct {
	sent, replied time.Time // ours, before and after
	clock         int64     // the region's in between, Unix µs
}

// check takes in a reading and reports whether the clock must have run slow since an earlier one of the era, whatever
// the time that requests and answers took on their way.
func (w *watchdog) check(r reading, era int64, lease time.Duration) bool {
	if era != w.era {
		*w = watchdog{era: era} // another history, perhaps another server
	}
	for len(w.readings) > 1 && r.replied.Sub(w.readings[1].sent) > lease {
		w.readings = w.readings[1:]
	}
	for _, old := range w.readings {
		ran := time.Duration(r.clock-old.clock) * time.Microsecond
		least := r.sent.Sub(old.replied)
		off := policy.ClockTolerance*time.Microsecond + time.Duration(drift*float64(least))
		w.wrong = w.wrong || ran < least-off
	}
	w.readings = append(w.readings, r)
	return w.wrong
}
