package dev

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

// indent is the beginning of all lines of a view except the first.
const indent = "       "

// tableLines returns the lines of a table.
func tableLines(t *terminal.Table, width int) []string {
	var b strings.Builder
	_ = t.Write(&b, width) // a strings.Builder doesn't fail
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}

// number returns a column of numbers.
func number(name string) terminal.Column { return terminal.Column{Name: name, Right: true} }

func millis(d time.Duration) string {
	return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
}

func perSecond(n int64) string { return strconv.FormatInt(n, 10) + "/s" }

// seconds formats a time since the start, such as 12s or 3m05s.
func seconds(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	if s < 60 {
		return fmt.Sprintf("%ds", s)
	}
	return fmt.Sprintf("%dm%02ds", s/60, s%60)
}

// thousands formats a number in groups of three digits.
func thousands(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
