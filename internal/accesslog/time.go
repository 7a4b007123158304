package accesslog

import (
	"bytes"
	"math"
	"strconv"
	"time"
)

// maxTimeLen is longer than every form of a time in a line of text.
const maxTimeLen = 48

// parseCLF reads the time of the common log format, such as
// "17/May/2015:10:05:03 +0000", also with a fraction of the second, as Unix µs.
func parseCLF(s []byte) (us int64, ok bool) {
	const shape = "00/Aaa/0000:00:00:00"
	if len(s) < len(shape)+len(" +0000") || s[2] != '/' || s[6] != '/' || s[11] != ':' || s[14] != ':' || s[17] != ':' {
		return 0, false
	}
	day, ok1 := digits(s[0:2])
	month := monthOf(s[3:6])
	year, ok2 := digits(s[7:11])
	hour, ok3 := digits(s[12:14])
	minute, ok4 := digits(s[15:17])
	second, ok5 := digits(s[18:20])
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || month == 0 || hour > 23 || minute > 59 || second > 60 {
		return 0, false
	}
	if day < 1 || day > daysIn(year, month) {
		return 0, false
	}
	rest := s[len(shape):]
	var fraction int64
	if rest[0] == '.' {
		n := 1
		for n < len(rest) && '0' <= rest[n] && rest[n] <= '9' {
			n++
		}
		if n == 1 {
			return 0, false
		}
		fraction, rest = micros(rest[1:n]), rest[n:]
	}
	offset, ok := parseOffset(rest)
	if !ok {
		return 0, false
	}
	seconds := daysFromEpoch(year, month, day)*86400 + hour*3600 + minute*60 + second - offset
	return seconds*1e6 + fraction, true
}

// parseOffset reads " +hhmm" as seconds east of UTC.
func parseOffset(s []byte) (seconds int64, ok bool) {
	if len(s) != len(" +0000") || s[0] != ' ' || s[1] != '+' && s[1] != '-' {
		return 0, false
	}
	hours, ok1 := digits(s[2:4])
	minutes, ok2 := digits(s[4:6])
	if !ok1 || !ok2 || hours > 23 || minutes > 59 {
		return 0, false
	}
	seconds = hours*3600 + minutes*60
	if s[1] == '-' {
		seconds = -seconds
	}
	return seconds, true
}

// parseISO reads an ISO 8601 time; one without a zone is taken as UTC.
func parseISO(s []byte) (us int64, ok bool) {
	if len(s) < len("2006-01-02 15:04:05") || s[4] != '-' || s[7] != '-' {
		return 0, false
	}
	layouts := [...]string{time.RFC3339, "2006-01-02T15:04:05Z0700", "2006-01-02T15:04:05"}
	text := string(s)
	if s[10] == ' ' {
		text = text[:10] + "T" + text[11:]
	}
	for _, layout := range layouts {
		if t, err := time.Parse(layout, text); err == nil {
			return t.UnixMicro(), true
		}
	}
	return 0, false
}

// parseEpoch reads a number of seconds since 1970, or, told by its size, of
// milliseconds, microseconds or nanoseconds.
func parseEpoch(s []byte) (us int64, ok bool) {
	whole, fraction, _ := bytes.Cut(s, []byte("."))
	if n, ok1 := digits(whole); ok1 && n < 1e11 {
		if _, ok2 := digits(fraction); ok2 || len(fraction) == 0 && len(whole) == len(s) {
			return n*1e6 + micros(fraction), true
		}
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
	return int64(f), true
}

// parseTime reads a time in any of the forms.
func parseTime(s []byte) (us int64, ok bool) {
	if us, ok = parseISO(s); ok {
		return us, true
	}
	if us, ok = parseCLF(s); ok {
		return us, true
	}
	return parseEpoch(s)
}

// digits reads a decimal number of at most 18 digits; it has at least one.
func digits(s []byte) (n int64, ok bool) {
	if len(s) == 0 || len(s) > 18 {
		return 0, false
	}
	for _, c := range s {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// micros reads the digits after a decimal point as millionths, rounded down.
func micros(s []byte) (us int64) {
	for i := range 6 {
		us *= 10
		if i < len(s) {
			us += int64(s[i] - '0')
		}
	}
	return us
}

// monthOf is the number of a month's English abbreviation, 0 if it is none.
func monthOf(s []byte) int64 {
	const names = "JanFebMarAprMayJunJulAugSepOctNovDec"
	for i := 0; i < len(names); i += 3 {
		if string(s) == names[i:i+3] {
			return int64(i/3) + 1
		}
	}
	return 0
}

func daysIn(year, month int64) int64 {
	switch month {
	case 4, 6, 9, 11:
		return 30
	case 2:
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

// daysFromEpoch counts the days from 1970-01-01 in the Gregorian calendar.
// Years begin in March here, so that the leap day comes last; an era is 400 of
// them. The year is at least 0.
func daysFromEpoch(year, month, day int64) int64 {
	if month <= 2 {
		year, month = year-1, month+12
	}
	year += 400 // keeps the divisions below off negative numbers
	era, inEra := year/400-1, year%400
	dayOfYear := (153*(month-3)+2)/5 + day - 1
	return era*146097 + inEra*365 + inEra/4 - inEra/100 + dayOfYear - 719468
}
