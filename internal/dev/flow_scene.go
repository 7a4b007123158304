package dev

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	inOrder = "in-order" // a bucket that serves takes in the order of their arrival
	divided = "divided"  // a bucket that is divided among its flows

	loudUser   = "loud"
	loudWants  = 250 // tokens per second
	quietUsers = 10
	quietWants = 8  // tokens per second that each of them wants
	ofLate     = 5  // readings over which rates are averaged
	barOf      = 20 // columns for all tokens that a bucket gives
)

// flowBuckets are the buckets of the scene, in the form of a configuration.
const flowBuckets = `buckets:
  - {key: in-order, capacity: 100, rate: 100/s}
  - {key: divided, capacity: 100, rate: 100/s, flows: {}}
`

// flowScene has one loud user and ten quiet ones. They send the same requests to two buckets, one with flows and one
// without.
type flowScene struct {
	*sampleScene
	readings []gotBy // the recent readings, the last one at the end
}

// gotBy has the tokens that users got from the buckets since the start.
type gotBy struct {
	elapsed     float64 // seconds
	loud, quiet map[string]int64
}

func (s *flowScene) title() string {
	return fmt.Sprintf("One loud user and %d quiet users ask two buckets for more tokens than these give. "+
		"Only one bucket has flows.", quietUsers)
}

// demands returns the demands of all users, those for the first bucket first.
func (s *flowScene) demands(int) (all []demand) {
	for _, key := range []string{inOrder, divided} {
		all = append(all, demand{key: key, tokens: 1, flow: loudUser, wanted: func() float64 { return loudWants }})
		for i := range quietUsers {
			all = append(all, demand{key: key, tokens: 1, flow: fmt.Sprintf("quiet-%d", i+1),
				wanted: func() float64 { return quietWants }})
		}
	}
	return all
}

func (s *flowScene) begin(ctx context.Context) (about, try []string, err error) {
	if _, _, err := s.sampleScene.begin(ctx); err != nil {
		return nil, nil, err
	}
	text := fmt.Sprintf("Each bucket gives %s. The loud user asks each bucket for %d/s, and each quiet user asks it for "+
		"%d/s. With flows, the quiet users get all that they ask for, and the loud user gets the rest.",
		s.buckets()[0].Policy.Rate, loudWants, quietWants)
	program, to := s.opts.program, " --redis "+s.regions[0].cfg.Redis.String()
	return terminal.Wrap(text, s.screen.width()), []string{
		"  " + s.screen.style.dim("# which users take the most tokens?"),
		"  " + program("refiller") + " status " + divided + " --flows --addr " + s.active.Load().url(),
		"  " + s.screen.style.dim("# a new user gets tokens at once"),
		"  " + program("consumer") + " take " + divided + " --flow me" + to,
	}, nil
}

// refresh reads how many tokens the users got.
func (s *flowScene) refresh(ctx context.Context) {
	s.sampleScene.refresh(ctx)
	now := gotBy{elapsed: s.elapsed.Seconds(), loud: map[string]int64{}, quiet: map[string]int64{}}
	c := s.regions[0].consumer
	for i, d := range c.demands {
		if d.flow == loudUser {
			now.loud[d.key] += c.got[i].Load()
		} else {
			now.quiet[d.key] += c.got[i].Load()
		}
	}
	s.readings = append(s.readings, now)
	if len(s.readings) > ofLate+1 {
		s.readings = s.readings[1:]
	}
}

// rates returns the recent rates at which users got tokens from a bucket, in tokens per second. The quiet users have a
// common rate.
func (s *flowScene) rates(key string) (loud, quiet float64) {
	if len(s.readings) == 0 {
		return 0, 0
	}
	last, first := s.readings[len(s.readings)-1], s.readings[0]
	if len(s.readings) == 1 {
		first = gotBy{}
	}
	over := max(0.001, last.elapsed-first.elapsed)
	return float64(last.loud[key]-first.loud[key]) / over, float64(last.quiet[key]-first.quiet[key]) / over
}

func (s *flowScene) lines(mark style, width int) []string {
	if s.store != nil {
		return s.sampleScene.lines(mark, width)
	}
	lines := []string{fmt.Sprintf("%5s  %s", seconds(s.elapsed), mark.bold(s.activity.describe(s.opts.Mode)))}
	t := terminal.NewTable(terminal.Column{Name: indent + "BUCKET", Text: true}, number("LOUD"), number("EACH QUIET"),
		number("OF THEIR DEMAND"), terminal.Column{Name: "LOUD ▒, QUIET █"})
	for _, key := range []string{inOrder, divided} {
		loud, quiet := s.rates(key)
		// The sum exceeds the bucket's rate while a full bucket is used up.
		all := max(s.buckets()[0].Policy.Rate.PerSecond(), loud+quiet)
		t.Row(indent+key, fmt.Sprintf("%.0f/s", loud), fmt.Sprintf("%.1f/s", quiet/quietUsers), ofDemand(quiet),
			bar("▒", loud/all)+bar("█", quiet/all))
	}
	return append(lines, tableLines(t, width)...)
}

// ofDemand returns the part of their demand that the quiet users got, in percent.
func ofDemand(quiet float64) string {
	return fmt.Sprintf("%.0f %%", 100*quiet/(quietUsers*quietWants))
}

// bar draws a part of all tokens that a bucket gives.
func bar(with string, part float64) string {
	return strings.Repeat(with, int(math.Round(barOf*part)))
}

func (s *flowScene) short() string {
	text := fmt.Sprintf("%5s  %s", seconds(s.elapsed), s.activity.describe(s.opts.Mode))
	for _, key := range []string{inOrder, divided} {
		loud, quiet := s.rates(key)
		text += fmt.Sprintf(" | %s: loud %.0f/s, quiet %.1f/s each, %s of their demand", key, loud, quiet/quietUsers,
			ofDemand(quiet))
	}
	return text
}

func (s *flowScene) summary() string {
	var texts []string
	for _, of := range []struct{ key, how string }{{inOrder, "without flows"}, {divided, "with flows"}} {
		_, quiet := s.rates(of.key)
		texts = append(texts, ofDemand(quiet)+" of their demand "+of.how)
	}
	return "the quiet users recently got " + strings.Join(texts, " and ")
}
