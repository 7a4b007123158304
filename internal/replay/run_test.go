package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/replay/accesslog"
	"github.com/tokenrefill/refiller/policy"
)

// requests is a log in memory: "second key" pairs.
type requests []struct {
	second float64
	key    string
}

func (r *requests) Next() (accesslog.Record, error) {
	if len(*r) == 0 {
		return accesslog.Record{}, io.EOF
	}
	first := (*r)[0]
	*r = (*r)[1:]
	return accesslog.Record{Time: int64(first.second * 1e6), Key: []byte(first.key)}, nil
}

func (*requests) Unparsed() accesslog.Unparsed {
	return accesslog.Unparsed{Lines: 1, Samples: []accesslog.Sample{{Line: 7, Reason: "bad"}}}
}

func sample() *requests {
	return &requests{{100, "a"}, {100, "a"}, {100.5, "b"}, {99, "a"}, {102, "a"}, {102, "b"}, {102.9, "c"}, {102.9, "c"},
		{110, "a"}}
}

var cfg = Config{Capacity: 1, Rate: policy.PerSecond(1), Top: 2}

func TestTheReportCountsWhatWasAdmittedAndDenied(t *testing.T) {
	t.Parallel()
	report, err := Run(t.Context(), sample(), cfg)
	require.NoError(t, err)
	at := func(second int64) time.Time { return time.Unix(second, 0).UTC() }
	require.Equal(t, Report{
		Total:    Total{Requests: 9, Admitted: 6, Denied: 3, Keys: 3, Unparsed: 1},
		Span:     Span{From: at(100), To: at(110), Seconds: 10, OutOfOrder: 1},
		Peak:     Peak{At: at(100), Requests: 4, Denied: 2},
		Top:      []Key{{Key: "a", Requests: 5, Admitted: 3, Denied: 2}, {Key: "c", Requests: 2, Admitted: 1, Denied: 1}},
		Unparsed: []accesslog.Sample{{Line: 7, Reason: "bad"}},
	}, report)
}

func TestTheSpeedChangesHowLongItTakesAndNothingElse(t *testing.T) {
	t.Parallel()
	want, err := Run(t.Context(), sample(), cfg)
	require.NoError(t, err)
	for speed, took := range map[Speed]time.Duration{Max: 0, 1: 10 * time.Second, 100: 100 * time.Millisecond,
		0.5: 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			cfg := cfg
			cfg.Speed = speed
			start := time.Now()
			got, err := Run(t.Context(), sample(), cfg)
			require.NoError(t, err)
			require.Equal(t, took, time.Since(start), "at %s", speed)
			require.Equal(t, want, got)
		})
	}
}

func TestASlowLogIsCaughtUpWith(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := cfg
		cfg.Speed = 1
		slow := false
		cfg.Progress = func(Total, int64) {
			if !slow {
				slow = true
				return
			}
			time.Sleep(time.Second) // less than the log's ten seconds in all
		}
		start := time.Now()
		_, err := Run(t.Context(), sample(), cfg)
		require.NoError(t, err)
		require.Equal(t, 10*time.Second, time.Since(start))
	})
}

func TestAnEndedContextStopsTheWaitAndReportsWhatWasReplayed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		cfg := cfg
		cfg.Speed = 1
		start := time.Now()
		report, err := Run(ctx, sample(), cfg)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 1500*time.Millisecond, time.Since(start))
		require.EqualValues(t, 4, report.Total.Requests)
		require.InDelta(t, 0.5, report.Span.Seconds, 1e-9)
	})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Run(ended, sample(), cfg)
	require.ErrorIs(t, err, context.Canceled, "a cancelled run ends at full speed, too")
}

func TestALogThatFailsEndsTheReplay(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	log, err := accesslog.NewReader(io.MultiReader(
		strings.NewReader(`{"ts":1,"ip":"192.0.2.1"}`+"\n"), failing{broken}), "ip", "")
	require.NoError(t, err)
	report, err := Run(t.Context(), log, cfg)
	require.ErrorIs(t, err, broken)
	require.EqualValues(t, 1, report.Total.Requests)
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestAnEmptyLogGivesAnEmptyReport(t *testing.T) {
	t.Parallel()
	report, err := Run(t.Context(), &requests{}, cfg)
	require.NoError(t, err)
	require.Zero(t, report.Total.Requests)
	require.Zero(t, report.Span)
	require.NotNil(t, report.Top)
}

func TestTheTopKeysDoNotDependOnTheOrderOfAMap(t *testing.T) {
	t.Parallel()
	for range 20 {
		log := &requests{}
		for i := range 200 {
			*log = append(*log, (requests{{float64(i), fmt.Sprintf("k%03d", i%50)}})...)
		}
		report, err := Run(t.Context(), log, Config{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: time.Hour}, Top: 3})
		require.NoError(t, err)
		k := Key{Requests: 4, Admitted: 1, Denied: 3}
		for i, name := range []string{"k000", "k001", "k002"} {
			k.Key = name
			require.Equal(t, k, report.Top[i])
		}
	}
}

func TestSpeedsAreReadAndWritten(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Speed{"max": Max, "1x": 1, "100x": 100, "0.5x": 0.5} {
		got, err := ParseSpeed(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, text, got.String())
	}
	for _, text := range []string{"", "x", "1", "0x", "-1x", "NaNx", "Infx", "1e9x", "fast"} {
		_, err := ParseSpeed(text)
		require.ErrorIs(t, err, ErrSpeed, text)
	}
}
