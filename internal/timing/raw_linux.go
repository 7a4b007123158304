package timing

import (
	"time"

	"golang.org/x/sys/unix"
)

// Raw returns the reading of a clock that no time daemon slews or sets. Only differences of readings have a meaning.
// The clock stops while the host is suspended.
func Raw() time.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
		return time.Now()
	}
	return time.Unix(ts.Unix())
}
