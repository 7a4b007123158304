package fields

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Problem is one error in a configuration.
type Problem struct {
	Source string `json:"source,omitempty"` // the file, variable or flag that has the value
	Line   int    `json:"line,omitempty"`   // from 1; 0 if it is in no file
	Column int    `json:"column,omitempty"` // from 1; 0 if it is in no file
	Field  string `json:"field,omitempty"`  // dotted path, such as buckets[0].rate; empty for the whole file
	Msg    string `json:"message"`          // the value, and the allowed values
}

// String formats the problem as compilers do: source:line:column: field: message.
func (p Problem) String() string {
	var b strings.Builder
	if p.Source != "" {
		b.WriteString(p.Source + ":")
	}
	if p.Line > 0 {
		fmt.Fprintf(&b, "%d:%d:", p.Line, p.Column)
	}
	if b.Len() > 0 {
		b.WriteByte(' ')
	}
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Msg)
	return b.String()
}

// Problems are all problems of a configuration, at least one, in the order of the file.
type Problems []Problem

// Error returns one line for each problem.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.String()
	}
	return strings.Join(lines, "\n")
}

func (p Problems) sort() {
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}

// Error is an error in one field of a struct, for validation without a file.
type Error struct {
	Field string // relative to the struct, such as tls.ca or endpoints[1]
	Msg   string
}

// Error implements error.
func (e *Error) Error() string { return e.Field + ": " + e.Msg }

// Path is the place of a value. It has names of fields, and items of lists as [0]. The nil Path is that of the whole
// file.
type Path []string

// Field returns the path of a field below p.
func (p Path) Field(name string) Path { return append(p[:len(p):len(p)], name) }

// Item returns the path of an item of the list p.
func (p Path) Item(i int) Path { return p.Field("[" + strconv.Itoa(i) + "]") }

// String formats the path as buckets[0].rate.
func (p Path) String() string {
	var b strings.Builder
	for i, step := range p {
		if i > 0 && !strings.HasPrefix(step, "[") {
			b.WriteByte('.')
		}
		b.WriteString(Brief(step))
	}
	return b.String()
}

// Closest returns the word that s likely misspells, or "".
func Closest(s string, words []string) string {
	best, least := "", 3
	if len(s) > maxShown {
		return ""
	}
	for _, w := range words {
		if d := distance(s, w); d < least && d < len(w)/2+1 && d < len(s) {
			best, least = w, d
		}
	}
	return best
}

// distance returns the least number of edits that turn a into b. An edit inserts, deletes or replaces a letter, or
// swaps it with the next one.
func distance(a, b string) int {
	before, row := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		next := make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			cost := row[j]
			if a[i] != b[j] {
				cost++
			}
			next[j+1] = min(cost, next[j]+1, row[j+1]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, row = row, next
	}
	return row[len(b)]
}

const maxShown = 64 // characters of a value in a message

// Quote returns text as messages show it: shortened, in quotes, and without control sequences of terminals.
func Quote(s string) string {
	if r := []rune(s); len(r) > maxShown {
		s = string(r[:maxShown]) + "..."
	}
	return strconv.Quote(s)
}

// Brief returns the same as Quote, but without quotes. It is for text that is usually a plain word.
func Brief(s string) string {
	q := Quote(s)
	if word := q[1 : len(q)-1]; !strings.Contains(word, `\`) {
		return word
	}
	return q
}
