package dev

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/policy"
)

func someScene() *sampleScene {
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: policy.DefaultInterval}
	r := &region{cfg: config.Config{Buckets: []config.Bucket{{Key: watched, Policy: p}}},
		lately: taken{admitted: 498, denied: 102}, total: taken{admitted: 33_000, denied: 5000}}
	s := &sampleScene{
		playground: &playground{elapsed: 65 * time.Second, opts: Options{Mode: config.ModeEtcd}, regions: []*region{r}},
		activity:   activity{active: "replica-2", leader: &admin.Leader{Identity: "replica-2", Epoch: 14}},
		levels:     []level{{"checkout", 12, 1000}, {"mail", 20, 20}, {"llm-tokens", 30000, 60000}}, index: 640,
		followed: []*refills{{}},
	}
	s.gaps.add(203 * time.Millisecond)
	s.gaps.add(215 * time.Millisecond)
	return s
}

func TestAViewHasAFewLinesOnATerminal(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{
		"1m05s  replica-2 leads under epoch 14 and refills",
		"       checkout 12/1000  mail 20/20  llm-tokens 30000/60000",
		"       checkout: index 640, 498/s admitted, 102/s denied",
		"       33,000 of at most 33,551 tokens admitted",
		"       refill gap: p50 215 ms, max 215 ms over 2 kills",
	}, someScene().lines(false, 0))
	colored := strings.Join(someScene().lines(true, 0), "\n")
	require.Contains(t, colored,
		"checkout \x1b[31m12/1000\x1b[0m  mail \x1b[32m20/20\x1b[0m  llm-tokens \x1b[33m30000/60000\x1b[0m")
}

func TestAViewHasOneLineElsewhere(t *testing.T) {
	t.Parallel()
	require.Equal(t, "1m05s  replica-2 leads under epoch 14 and refills"+
		" | checkout 12/1000  mail 20/20  llm-tokens 30000/60000"+
		" | checkout: index 640, 498/s admitted, 102/s denied | 33,000 of at most 33,551 tokens admitted"+
		" | refill gap: p50 215 ms, max 215 ms over 2 kills", someScene().short())
	v := &sampleScene{playground: &playground{elapsed: 9 * time.Second}, store: errors.New("gone")}
	require.Equal(t, "   9s  the store doesn't answer: gone", v.short())
	require.Equal(t, []string{v.short()}, v.lines(false, 80))
}

func TestMoreThanTheBoundIsSaid(t *testing.T) {
	t.Parallel()
	v := someScene()
	v.regions[0].total.admitted = 33_552
	require.Contains(t, v.short(), "too many")
	require.NotContains(t, someScene().short(), "too many")
	v.regions[0].total.failed = 3
	require.Contains(t, v.short(), "102/s denied, 3 unanswered")
}

func TestTheBoundIsCapacityAndWhatFallsDueAndOneGap(t *testing.T) {
	t.Parallel()
	p := policy.Policy{Capacity: 1000, Rate: policy.Rate{Tokens: 500, Per: time.Second}, Interval: 100 * time.Millisecond}
	require.EqualValues(t, 1000+5000+1+50, bound(p, 10*time.Second, 0))
	require.EqualValues(t, 1000+5000+1+100, bound(p, 10*time.Second, 200*time.Millisecond))
}

func TestTheIntroductionSaysWhatRunsAndWhatToType(t *testing.T) {
	t.Parallel()
	o := Options{GoRun: true, Mode: config.ModeEtcd, Etcd: []string{"http://127.0.0.1:12379"}, KillEvery: 5 * time.Second}
	cfg, err := o.config("", "redis://127.0.0.1:16379", o.Etcd, nil)
	require.NoError(t, err)
	p := &playground{opts: o, dir: "/tmp/x", screen: &screen{}}
	r := &region{cfg: cfg}
	for i, pid := range []int{41, 42} {
		one := &replica{name: fmt.Sprintf("replica-%d", i+1)}
		one.process.Store(&process{addr: fmt.Sprintf("127.0.0.1:%d", adminPort+i), pid: pid})
		r.replicas = append(r.replicas, one)
	}
	p.regions = []*region{r}
	s := &sampleScene{playground: p}
	text := strings.Join(p.introduction(s.about(80), s.try(r.replicas[1]), false, 80), "\n")
	for _, line := range []string{
		"  store      redis://127.0.0.1:16379  embedded\n",
		"  etcd       http://127.0.0.1:12379   yours, elects the leader\n",
		"  replica-2  http://127.0.0.1:19091   pid 42\n",
		"  logs  /tmp/x\n",
		"  checkout          1000  500/s                       600/s\n",
		"  digest               5  5 every 10s\n",
		"  go run ./cmd/consumer take checkout --redis redis://127.0.0.1:16379\n",
		"  go run ./cmd/consumer take user:42 --redis redis://127.0.0.1:16379\n",
		"  go run ./cmd/refiller status --addr http://127.0.0.1:19090\n",
		"  kill -9 42\n",
		"Every 5s the replica that refills is killed.",
	} {
		require.Contains(t, text, line)
	}
	require.NotContains(t, text, "\x1b")
	p.opts = Options{}
	require.Contains(t, s.try(r.replicas[1]), "  consumer take checkout --redis redis://127.0.0.1:16379")
	require.Contains(t, s.try(r.replicas[1]), "  refiller status --addr http://127.0.0.1:19090")
	text = strings.Join(p.introduction(s.about(80), nil, false, 80), "\n")
	require.NotContains(t, text, "etcd")
	require.NotContains(t, text, "Every 5s")
}

func TestNumbersAreGroupedByThousands(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -100: "-100",
		-1000: "-1,000"} {
		require.Equal(t, want, thousands(n))
	}
}

func TestATerminalsStatusIsRewrittenBelowTheLinesThatStay(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := &screen{out: &out, rewrites: true, width: func() int { return 0 },
		failed: func(err error) { t.Errorf("write: %v", err) }}
	draw := func(text string) string { return wrapOff + text + wrapOn }
	next := func() string {
		defer out.Reset()
		return out.String()
	}

	s.println("hello")
	require.Equal(t, "hello\n", next())
	s.show(startup, []string{"a", "b"}, "short")
	require.Equal(t, draw("a\nb\n"), next())
	s.show(startup, []string{"c"}, "short")
	require.Equal(t, "\x1b[2A\r\x1b[J"+draw("c\n"), next(), "both lines were removed")
	s.println("news")
	require.Equal(t, "\x1b[1A\r\x1b[J"+"news\n"+draw("c\n"), next())
	s.clear()
	s.println("end")
	require.Equal(t, "\x1b[1A\r\x1b[J"+"end\n", next())
}

func TestElsewhereTheStatusIsALineFromTimeToTime(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := &screen{out: &out, failed: func(err error) { t.Errorf("write: %v", err) }}
	for i := range 11 {
		s.show(startup.Add(time.Duration(i)*time.Second), []string{"a", "b"}, "short")
	}
	s.clear()
	require.Equal(t, "short\nshort\nshort\n", out.String())
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestAReaderThatGoesAwayIsNoticed(t *testing.T) {
	t.Parallel()
	var failure error
	s := &screen{out: closedPipe{}, failed: func(err error) { failure = err }}
	s.println("hello")
	require.EqualError(t, failure, "broken pipe")
}
