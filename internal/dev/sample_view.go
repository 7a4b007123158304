package dev

import (
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/terminal"
)

// sampleView is how replicas, buckets and consumer stand.
type sampleView struct {
	elapsed time.Duration // since the consumer started
	who     string
	index   int64 // of the watched bucket
	store   error // why the store isn't known
	levels  []level
	lately  taken // per second
	total   taken
	bound   int64  // most tokens that may have been admitted
	gaps    string // of kills; empty if there were none
}

// level is what a bucket holds.
type level struct {
	key              string
	tokens, capacity int64
}

// lines is the view for a terminal with so many columns.
func (v sampleView) lines(s style, width int) []string {
	if v.store != nil {
		return []string{fmt.Sprintf("%5s  %s", seconds(v.elapsed), s.red("the store doesn't answer: "+v.store.Error()))}
	}
	levels := make([]string, len(v.levels))
	for i, l := range v.levels {
		levels[i] = l.key + " " + s.mark(l.color(), fmt.Sprintf("%d/%d", l.tokens, l.capacity))
	}
	lines := []string{fmt.Sprintf("%5s  %s", seconds(v.elapsed), s.bold(v.who))}
	if width > 0 {
		width = max(1, width-len(indent))
	}
	for _, l := range terminal.Flow(levels, "  ", width) {
		lines = append(lines, indent+l)
	}
	lines = append(lines, fmt.Sprintf("%s%s: index %d, %s admitted, %s denied%s", indent, watched, v.index,
		s.green(perSecond(v.lately.admitted)), perSecond(v.lately.denied), v.failures()), indent+v.held(s))
	if v.gaps != "" {
		lines = append(lines, indent+"refill gap: "+v.gaps)
	}
	return lines
}

// short is the view on one line.
func (v sampleView) short() string {
	lines := v.lines(false, 0)
	for i := range lines[1:] {
		lines[i+1] = strings.TrimSpace(lines[i+1])
	}
	return strings.Join(lines, " | ")
}

func (v sampleView) failures() string {
	if v.total.failed == 0 {
		return ""
	}
	return fmt.Sprintf(", %d unanswered", v.total.failed)
}

// held is what was admitted, held against the bound.
func (v sampleView) held(s style) string {
	text := fmt.Sprintf("%s tokens admitted of at most %s", thousands(v.total.admitted), thousands(v.bound))
	if v.total.admitted > v.bound {
		return s.red(text + ": too many, unless tokens were granted or returned")
	}
	return text
}

// color is red for an empty bucket and green for a full one.
func (l level) color() string {
	switch {
	case l.tokens >= l.capacity:
		return "32"
	case l.tokens*20 < l.capacity:
		return "31"
	default:
		return "33"
	}
}
