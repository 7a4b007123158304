package dev

import (
	"fmt"
	"strings"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	barWidth = 20  // characters for the whole rate
	wide     = 105 // from this number of columns on, a bar and the remarks about its region are on one line
)

// state returns remarks about the state of a region.
func (r *region) state() string {
	cut := r.isCut.Load()
	switch {
	case r.share.err != nil:
		return "the store doesn't answer"
	case r.share.left == 0 && cut:
		return "cut off, on its floor"
	case r.share.left == 0:
		return "on its floor"
	case cut:
		return fmt.Sprintf("cut off, %.0f s left of its grant", r.share.left.Seconds())
	}
	return ""
}

func (s *poolScene) lines(mark style, width int) []string {
	t := terminal.NewTable(terminal.Column{Name: "region", Text: true}, number("share"), number("wanted"),
		number("admitted"), number("denied"),
		number("tokens"))
	for i, r := range s.regions {
		t.Row(r.name, fmt.Sprintf("%.0f/s", r.share.rate), fmt.Sprintf("%.0f/s", s.wanted(i)), perSecond(r.lately.admitted),
			perSecond(r.lately.denied), r.share.tokens)
	}
	table := tableLines(t, width)
	lines := []string{fmt.Sprintf("%5s  %s", seconds(s.elapsed), mark.bold(s.who())), mark.dim(table[0])}
	for i, r := range s.regions {
		full := min(barWidth, max(0, int(r.share.rate*barWidth/sharedRate+0.5)))
		line := table[i+1] + "  " + mark.green(strings.Repeat("█", full)) + mark.dim(strings.Repeat("·", barWidth-full))
		switch state := r.state(); {
		case state != "" && 0 < width && width < wide:
			line = table[i+1] + "  " + mark.red(state)
		case state != "":
			line += "  " + mark.red(state)
		}
		lines = append(lines, line)
	}
	for _, l := range terminal.Wrap(s.sums(), width-len(indent)) {
		lines = append(lines, indent+l)
	}
	return lines
}

func (s *poolScene) who() string {
	if s.coordinator == "" {
		return "no coordinator is known"
	}
	return s.coordinator + " coordinates"
}

func (s *poolScene) sums() string {
	inForce := 0.0
	for _, r := range s.regions {
		inForce += r.share.rate
	}
	return fmt.Sprintf("shares in force: %.0f/s of %d/s; %s", inForce, sharedRate, s.held(""))
}

func (s *poolScene) short() string {
	parts := make([]string, len(s.regions))
	for i, r := range s.regions {
		parts[i] = fmt.Sprintf("%s has %.0f/s of %.0f/s wanted, %s admitted", r.name, r.share.rate, s.wanted(i),
			perSecond(r.lately.admitted))
		if state := r.state(); state != "" {
			parts[i] += " (" + state + ")"
		}
	}
	return fmt.Sprintf("%5s  %s | %s | %s", seconds(s.elapsed), s.who(), strings.Join(parts, " | "), s.sums())
}
