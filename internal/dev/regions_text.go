package dev

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// barWidth is how many characters stand for the whole rate.
const barWidth = 30

// introduce is what people read once the pool is shared.
func (p *regions) introduce() {
	s := p.screen.style
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, r := range p.list {
		fmt.Fprintf(t, "  %s\t%s", r.name, r.url)
		for _, one := range r.replicas {
			fmt.Fprintf(t, "\t%s %s pid %d", one.name, one.url(), one.pid())
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush() // a strings.Builder doesn't fail
	p.screen.println("", strings.TrimRight(b.String(), "\n"), "  logs  "+p.dir, "",
		fmt.Sprintf("Consumers of one region after the other want %d/s, those of the others %d/s each. Every region is %s from etcd.", busy, calm, 2*oneWay), "",
		s.bold("In a second terminal, try"),
		"  go run ./cmd/refiller pool status --prefix "+electionPrefix+" --etcd "+p.list[0].etcd.Addr(),
		"  go run ./cmd/consumer take "+sharedPool+" -n 5 --redis "+p.list[0].url,
		"", s.bold("Ctrl-C")+" stops everything and removes its files.", "")
}

// regionsView is how the regions stand at one moment.
type regionsView struct {
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
func (v regionsView) total() (rate float64) {
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
		return fmt.Sprintf("cut off, its grant ends in %.0f s", r.share.left.Seconds())
	}
	return ""
}

// lines is the view for a terminal.
func (v regionsView) lines(s style) []string {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "region\tshare\twanted\tadmitted\tdenied\ttokens\t\n")
	for _, r := range v.regions {
		fmt.Fprintf(t, "%s\t%.0f/s\t%d/s\t%s\t%s\t%d\t\n", r.name, r.share.rate, r.wants, perSecond(r.lately.admitted), perSecond(r.lately.denied), r.share.tokens)
	}
	_ = t.Flush() // a strings.Builder doesn't fail
	table := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	lines := []string{fmt.Sprintf("%5s  %s", seconds(v.elapsed), s.bold(v.who())), s.dim(table[0])}
	for i, r := range v.regions {
		full := min(barWidth, max(0, int(r.share.rate*barWidth/sharedRate+0.5)))
		bar := s.green(strings.Repeat("█", full)) + s.dim(strings.Repeat("·", barWidth-full))
		lines = append(lines, strings.TrimRight(table[i+1]+" "+bar+" "+s.red(r.state()), " "))
	}
	return append(lines, "       "+v.sums())
}

func (v regionsView) who() string {
	if v.coordinator == "" {
		return "nobody is known to coordinate"
	}
	return v.coordinator + " coordinates"
}

func (v regionsView) sums() string {
	return fmt.Sprintf("in force together %.0f/s of %d/s; %s tokens admitted of at most %s", v.total(), sharedRate, thousands(v.admitted), thousands(v.bound))
}

// short is the view on one line.
func (v regionsView) short() string {
	parts := make([]string, len(v.regions))
	for i, r := range v.regions {
		parts[i] = fmt.Sprintf("%s has %.0f/s of %d/s wanted, %s admitted", r.name, r.share.rate, r.wants, perSecond(r.lately.admitted))
		if state := r.state(); state != "" {
			parts[i] += " (" + state + ")"
		}
	}
	return fmt.Sprintf("%5s  %s | %s | %s", seconds(v.elapsed), v.who(), strings.Join(parts, " | "), v.sums())
}
