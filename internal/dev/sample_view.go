package dev

import (
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/terminal"
	"github.com/tokenrefill/refiller/policy"
)

// introduction is what people read once everything runs.
type introduction struct {
	redis         string
	embeddedRedis bool
	etcd          []string // empty: there is none
	embeddedEtcd  bool
	replicas      []replicaLine
	logs          string
	buckets       []config.Bucket
	victim        int // a process to kill: it refills
	killEvery     time.Duration
}

type replicaLine struct {
	name, url string
	pid       int
}

// lines is the introduction for a terminal with so many columns.
func (i introduction) lines(s style, width int) []string {
	what := map[bool]string{true: "embedded", false: "yours"}
	servers := terminal.NewTable(terminal.Column{}, terminal.Column{}, terminal.Column{Text: true})
	servers.Row("  store", i.redis, what[i.embeddedRedis])
	if len(i.etcd) > 0 {
		servers.Row("  etcd", strings.Join(i.etcd, ","), what[i.embeddedEtcd]+", elects the leader")
	}
	for _, r := range i.replicas {
		servers.Row("  "+r.name, r.url, fmt.Sprintf("pid %d", r.pid))
	}
	buckets := terminal.NewTable(terminal.Column{Name: "  BUCKET", Text: true}, number("CAPACITY"),
		terminal.Column{Name: "REFILL", Text: true},
		number("DEMAND"))
	for _, bucket := range i.buckets {
		note := ""
		for _, d := range demands {
			if d.key == bucket.Key && d.key == watched {
				note = fmt.Sprintf("%.0f/s", d.wanted())
			}
		}
		buckets.Row("  "+bucket.Key, bucket.Policy.Capacity, schedule(bucket), note)
	}
	to := " --redis " + i.redis
	lines := []string{""}
	lines = append(lines, tableLines(servers, width)...)
	lines = append(lines, "  logs  "+i.logs, "")
	lines = append(lines, tableLines(buckets, width)...)
	lines = append(lines, "", s.bold("In a second terminal, try"),
		"  go run ./cmd/consumer take mail -n 5"+to,
		"  go run ./cmd/consumer take "+watched+to,
		"  "+s.dim("# one of a template's buckets: any other user has one too"),
		"  go run ./cmd/consumer take "+anyUser+to,
		"  go run ./cmd/refiller status --addr "+i.replicas[0].url,
		"  "+s.dim("# it refills: see how soon another one does"),
		fmt.Sprintf("  kill -9 %d", i.victim))
	if i.killEvery > 0 {
		lines = append(append(lines, ""), terminal.Wrap(
			fmt.Sprintf("Every %s the replica that refills is killed. The gap is from its last "+
				"refill to the next one, as the store tells it.", i.killEvery), width)...)
	}
	return append(lines, "", s.bold("Ctrl-C")+" stops everything and removes its files.", "")
}

// schedule says when a bucket gets how many tokens.
func schedule(b config.Bucket) string {
	switch steps := b.Policy.Steps.(type) {
	case nil:
		return b.Policy.Rate.String()
	case policy.Every:
		return fmt.Sprintf("%d %s", b.Policy.StepTokens, steps)
	default:
		return fmt.Sprintf("%d at %s (cron)", b.Policy.StepTokens, steps)
	}
}

// sampleView is how replicas, buckets and consumer stand.
type sampleView struct {
	elapsed time.Duration // since the consumer started
	who     string
	index   int64 // of the watched bucket
	store   error // why the store isn't known
	levels  []level
	lately  taken // per second
	total   taken
	bound   int64 // most tokens that may have been admitted
	p50     time.Duration
	longest time.Duration
	kills   int
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
	if v.kills > 0 {
		lines = append(lines, indent+"refill gap: "+gapSummary(v.p50, v.longest, v.kills))
	}
	return lines
}

// short is the view on one line.
func (v sampleView) short() string {
	if v.store != nil {
		return fmt.Sprintf("%5s  the store doesn't answer: %v", seconds(v.elapsed), v.store)
	}
	levels := make([]string, len(v.levels))
	for i, l := range v.levels {
		levels[i] = fmt.Sprintf("%s %d/%d", l.key, l.tokens, l.capacity)
	}
	return fmt.Sprintf("%5s  %s | index %d | %s | %s admitted, %s denied%s | %s", seconds(v.elapsed), v.who, v.index,
		strings.Join(levels, ", "), perSecond(v.lately.admitted), perSecond(v.lately.denied), v.failures(), v.held(false))
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

// gapSummary sums up the kills of replicas that refilled.
func gapSummary(p50, longest time.Duration, kills int) string {
	noun := "kills"
	if kills == 1 {
		noun = "kill"
	}
	return fmt.Sprintf("p50 %s, max %s over %d %s", millis(p50), millis(longest), kills, noun)
}
