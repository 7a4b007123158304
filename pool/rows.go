package pool

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// format is the first word of shares and reports. A later release with another format must use another word, so that
// this release doesn't misread its records.
const format = "1"

// maxEpoch is the highest epoch that a record may have. A coordinator must be able to use a higher one.
const maxEpoch = 1 << 51

// table encodes lines, which consist of a name and numbers. A name may have several lines. Each number is written as
// its difference, in base 36, from the same number of an earlier line, and left out if the two are equal. So values
// that all lines have in common are written once. The nth line of a name is compared with the latest nth line of
// another name. If there is none, it is compared with the line above.
type table struct {
	name   string
	nth    int
	before [][]int64 // the numbers of the latest first line, of the latest second line, and so on
}

// base returns the numbers of the earlier line with which the next line is compared. Each line has count numbers.
func (t *table) base(name string, count int) []int64 {
	t.nth++
	if name != t.name || t.before == nil {
		t.name, t.nth = name, 0
	}
	switch {
	case t.nth < len(t.before):
	case t.nth == 0:
		t.before = append(t.before, make([]int64, count))
	default:
		t.before = append(t.before, slices.Clone(t.before[t.nth-1]))
	}
	return t.before[t.nth]
}

// append appends a line. All lines of a table have the same count of numbers.
func (t *table) append(b []byte, name string, numbers ...int64) []byte {
	before := t.base(name, len(numbers))
	b = append(b, name...)
	end := len(b)
	for i, n := range numbers {
		b = append(b, ' ')
		if d := n - before[i]; d != 0 {
			b = strconv.AppendInt(b, d, 36)
			end = len(b)
		}
		before[i] = n
	}
	return append(b[:end], '\n')
}

// parse reads a line of count numbers. The numbers are valid until the next call.
func (t *table) parse(line string, count int) (name string, numbers []int64, err error) {
	name, line, more := strings.Cut(line, " ")
	numbers = t.base(name, count)
	for i := 0; more; i++ {
		var word string
		word, line, more = strings.Cut(line, " ")
		if word == "" && i < count {
			continue
		}
		d, err := strconv.ParseInt(word, 36, 64)
		if err != nil || i >= count {
			return "", nil, fmt.Errorf("%w: %s: number %d is %q, want %d numbers", ErrRecord, name, i+1, word, count)
		}
		numbers[i] += d
	}
	if !validName(name) {
		return "", nil, fmt.Errorf("%w: %q is no name", ErrRecord, name)
	}
	return name, numbers, nil
}

// lines splits a record into its lines. The first line must begin with the format and word. first is the rest of that
// line.
func lines(text, word string) (first string, rest []string, err error) {
	text, ended := strings.CutSuffix(text, "\n")
	first, body, some := strings.Cut(text, "\n")
	value, ok := strings.CutPrefix(first, format+" "+word+" ")
	if !ended || !ok {
		return "", nil, fmt.Errorf("%w: it begins with %.40q, want %q", ErrRecord, first, format+" "+word)
	}
	if some {
		rest = strings.Split(body, "\n")
	}
	return value, rest, nil
}
