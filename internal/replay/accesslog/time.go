package accesslog

import (
	"math"
	"strconv"
	"time"
)

// maxTimeLen is longer than any time in a line of text.
const maxTimeLen = 48

// layouts are the layouts of times in the common log format and in ISO 8601. A time without a zone is in UTC. Each
// layout also accepts a fraction of the second.
var layouts = []string{
	"02/Jan/2006:15:04:05 -0700",
	time.RFC3339, "2006-01-02T15:04:05Z0700", "2006-01-02T15:04:05",
	"2006-01-02 15:04:05Z07:00", "2006-01-02 15:04:05Z0700", "2006-01-02 15:04:05",
}

// parseDate reads a time in one of the layouts as Unix µs.
func parseDate(s []byte) (us int64, ok bool) {
	text := string(s)
	for _, layout := range layouts {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UnixMicro(), true
		}
	}
	return 0, false
}

// parseTime reads a date as parseDate does, or a number since 1970, as Unix µs. The size of the number determines
// whether it counts seconds, milliseconds, microseconds or nanoseconds.
func parseTime(s []byte) (us int64, ok bool) {
	us, ok = parseDate(s)
	if ok {
		return us, true
	}
	f, err := strconv.ParseFloat(string(s), 64)
	switch {
	case err != nil || math.IsNaN(f) || f < 0 || f >= 1e20:
		return 0, false
	case f < 1e11:
		f *= 1e6
	case f < 1e14:
		f *= 1e3
	case f >= 1e17:
		f /= 1e3
	}
	return int64(math.Round(f)), true
}
