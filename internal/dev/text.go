package dev

import (
	"fmt"
	"strconv"
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
	buckets := terminal.NewTable(terminal.Column{Name: "  BUCKET", Text: true}, number("CAPACITY"), terminal.Column{Name: "REFILL", Text: true},
		number("DEMAND"))
	for _, bucket := range i.buckets {
		note := ""
		for _, d := range demands {
			if d.key == bucket.Key && d.key == watched {
				note = fmt.Sprintf("%d/s", d.tokens*int64(time.Second/d.every))
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
		lines = append(append(lines, ""), terminal.Wrap(fmt.Sprintf("Every %s the replica that refills is killed. The gap is from its last "+
			"refill to the next one, as the store tells it.", i.killEvery), width)...)
	}
	return append(lines, "", s.bold("Ctrl-C")+" stops everything and removes its files.", "")
}

// tableLines are the lines of a table.
func tableLines(t *terminal.Table, width int) []string {
	var b strings.Builder
	_ = t.Write(&b, width) // a strings.Builder doesn't fail
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}

// number is a column of numbers.
func number(name string) terminal.Column { return terminal.Column{Name: name, Right: true} }

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

// view is the state of the playground at one moment.
type view struct {
	elapsed time.Duration // since the consumer started
	who     string
	index   int64 // of the watched bucket
	store   error // why the store isn't known
	levels  []level
	rate    taken // in the last second
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

// indent stands before the lines that follow the first one of a view.
const indent = "       "

// lines is the view for a terminal with so many columns.
func (v view) lines(s style, width int) []string {
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
		s.green(perSecond(v.rate.admitted)), perSecond(v.rate.denied), v.failures()), indent+v.held(s))
	if v.kills > 0 {
		lines = append(lines, indent+"refill gap: "+gapSummary(v.p50, v.longest, v.kills))
	}
	return lines
}

// short is the view on one line.
func (v view) short() string {
	if v.store != nil {
		return fmt.Sprintf("%5s  the store doesn't answer: %v", seconds(v.elapsed), v.store)
	}
	levels := make([]string, len(v.levels))
	for i, l := range v.levels {
		levels[i] = fmt.Sprintf("%s %d/%d", l.key, l.tokens, l.capacity)
	}
	return fmt.Sprintf("%5s  %s | index %d | %s | %s admitted, %s denied%s | %s", seconds(v.elapsed), v.who, v.index,
		strings.Join(levels, ", "), perSecond(v.rate.admitted), perSecond(v.rate.denied), v.failures(), v.held(false))
}

func (v view) failures() string {
	if v.total.failed == 0 {
		return ""
	}
	return fmt.Sprintf(", %d unanswered", v.total.failed)
}

// held is what was admitted, held against the bound.
func (v view) held(s style) string {
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

func millis(d time.Duration) string {
	return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
}

func perSecond(n int64) string { return strconv.FormatInt(n, 10) + "/s" }

// seconds is a time since the start, such as 12s or 3m05s.
func seconds(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	if s < 60 {
		return fmt.Sprintf("%ds", s)
	}
	return fmt.Sprintf("%dm%02ds", s/60, s%60)
}

// thousands is a number in groups of three digits.
func thousands(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
