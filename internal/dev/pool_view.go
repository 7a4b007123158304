package dev

import (
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/terminal"
)

const (
	barWidth = 20  // characters that stand for the whole rate
	wide     = 105 // columns from which on a bar and what is special about its region stand beside each other
)

// poolView is how the regions stand at one moment.
type poolView struct {
	elapsed     time.Duration
	coordinator string
	regions     []regionView
	admitted    int64
	bound       int64
}

type regionView struct {
	name   string
	wants  int64
	cut    bool
	share  share
	lately taken
}

// total is what the rates in force add up to.
func (v poolView) total() (rate float64) {
	for _, r := range v.regions {
		rate += r.share.rate
	}
	return rate
}

// state is what is special about a region.
func (r regionView) state() string {
	switch {
	case r.share.err != nil:
		return "the store doesn't answer"
	case r.share.left == 0 && r.cut:
		return "cut off, on its floor"
	case r.share.left == 0:
		return "on its floor"
	case r.cut:
		return fmt.Sprintf("cut off, %.0f s left of its grant", r.share.left.Seconds())
	}
	return ""
}

// lines is the view for a terminal with so many columns.
func (v poolView) lines(s style, width int) []string {
	t := terminal.NewTable(terminal.Column{Name: "region", Text: true}, number("share"), number("wanted"),
		number("admitted"), number("denied"),
		number("tokens"))
	for _, r := range v.regions {
		t.Row(r.name, fmt.Sprintf("%.0f/s", r.share.rate), fmt.Sprintf("%d/s", r.wants), perSecond(r.lately.admitted),
			perSecond(r.lately.denied), r.share.tokens)
	}
	table := tableLines(t, width)
	lines := []string{fmt.Sprintf("%5s  %s", seconds(v.elapsed), s.bold(v.who())), s.dim(table[0])}
	for i, r := range v.regions {
		full := min(barWidth, max(0, int(r.share.rate*barWidth/sharedRate+0.5)))
		line := table[i+1] + "  " + s.green(strings.Repeat("█", full)) + s.dim(strings.Repeat("·", barWidth-full))
		switch state := r.state(); {
		case state != "" && 0 < width && width < wide:
			line = table[i+1] + "  " + s.red(state)
		case state != "":
			line += "  " + s.red(state)
		}
		lines = append(lines, line)
	}
	for _, l := range terminal.Wrap(v.sums(), width-len(indent)) {
		lines = append(lines, indent+l)
	}
	return lines
}

func (v poolView) who() string {
	if v.coordinator == "" {
		return "nobody is known to coordinate"
	}
	return v.coordinator + " coordinates"
}

func (v poolView) sums() string {
	return fmt.Sprintf("in force together %.0f/s of %d/s; %s tokens admitted of at most %s", v.total(), sharedRate,
		thousands(v.admitted), thousands(v.bound))
}

// short is the view on one line.
func (v poolView) short() string {
	parts := make([]string, len(v.regions))
	for i, r := range v.regions {
		parts[i] = fmt.Sprintf("%s has %.0f/s of %d/s wanted, %s admitted", r.name, r.share.rate, r.wants,
			perSecond(r.lately.admitted))
		if state := r.state(); state != "" {
			parts[i] += " (" + state + ")"
		}
	}
	return fmt.Sprintf("%5s  %s | %s | %s", seconds(v.elapsed), v.who(), strings.Join(parts, " | "), v.sums())
}
