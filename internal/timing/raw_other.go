//go:build !linux

package timing

import "time"

// Raw returns the reading of the monotonic clock, which a time daemon may slew here.
func Raw() time.Time { return time.Now() }
