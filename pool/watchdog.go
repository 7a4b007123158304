package pool

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// watchdog compares a region's clock with a clock of this process that no time daemon slews. A grant ends on the
// region's clock. So a region's clock that stops or runs slow would lengthen the grant. The script can't detect this,
// but a comparison of two readings can. The coordinator already allows for a clock that is slow by up to drift (hold).
type watchdog struct {
	// readings has the readings of one era, oldest first. The readings of the last lease detect a clock that goes wrong
	// gradually. One older reading is kept, to detect an error that arose while the server was unavailable.
	readings []reading
	era      int64
	wrong    bool // the clock is wrong, so a grant of that era may last too long
}

// reading is one reading of the region's clock.
type reading struct {
	sent, replied time.Time // our times before and after the reading
	clock         int64     // the region's time in between, Unix µs
}

// check applies a reading. It reports whether the clock has certainly run slow since an earlier reading of the era,
// whatever the delays of the requests and replies were.
func (w *watchdog) check(r reading, era int64, lease time.Duration) bool {
	if era != w.era {
		*w = watchdog{era: era} // readings of another era may be from another server
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

// rate returns the least relative error that the region's clock must have: 0.01 means that it runs at least 1 % fast.
// It is below 0 if the clock certainly runs slow, and 0 if neither is certain.
func (w *watchdog) rate() float64 {
	if len(w.readings) < 2 {
		return 0
	}
	first, last := w.readings[0], w.readings[len(w.readings)-1]
	ran := time.Duration(last.clock-first.clock) * time.Microsecond
	least, most := last.sent.Sub(first.replied), last.replied.Sub(first.sent)
	if least <= 0 {
		return 0
	}
	return float64(ran-min(max(ran, least), most)) / float64(least)
}
