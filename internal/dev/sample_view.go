package dev

import (
	"fmt"
	"strings"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

func (s *sampleScene) lines(mark style, width int) []string {
	if s.store != nil {
		return []string{fmt.Sprintf("%5s  %s", seconds(s.elapsed), mark.red("the store doesn't answer: "+s.store.Error()))}
	}
	levels := make([]string, len(s.levels))
	for i, l := range s.levels {
		levels[i] = l.key + " " + mark.mark(l.color(), fmt.Sprintf("%d/%d", l.tokens, l.capacity))
	}
	lines := []string{fmt.Sprintf("%5s  %s", seconds(s.elapsed), mark.bold(s.activity.describe(s.opts.Mode)))}
	if width > 0 {
		width = max(1, width-len(indent))
	}
	for _, l := range terminal.Flow(levels, "  ", width) {
		lines = append(lines, indent+l)
	}
	r := s.regions[0]
	lines = append(lines, fmt.Sprintf("%s%s: index %d, %s admitted, %s denied%s", indent, watched, s.index,
		mark.green(perSecond(r.lately.admitted)), perSecond(r.lately.denied), r.total.failures()), indent+s.held(mark))
	if gaps := s.gaps.String(); gaps != "" {
		lines = append(lines, indent+"refill gap: "+gaps)
	}
	return lines
}

func (s *sampleScene) short() string {
	lines := s.lines(false, 0)
	for i := range lines[1:] {
		lines[i+1] = strings.TrimSpace(lines[i+1])
	}
	return strings.Join(lines, " | ")
}

func (t taken) failures() string {
	if t.failed == 0 {
		return ""
	}
	return fmt.Sprintf(", %d unanswered", t.failed)
}

// held compares the admitted tokens with the bound.
func (s *sampleScene) held(mark style) string {
	admitted := s.regions[0].total.admitted
	bound := bound(s.buckets()[0].Policy, s.elapsed, s.followed[0].longestGap())
	text := fmt.Sprintf("%s of at most %s tokens admitted", thousands(admitted), thousands(bound))
	if admitted > bound {
		return mark.red(text + ": too many, unless tokens were granted or returned")
	}
	return text
}

// color returns red for an empty bucket and green for a full one.
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
