package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
)

const replayLog = "../../docs/access.log"

// replayed runs "consumer replay" with the arguments.
func replayed(ctx context.Context, stdin io.Reader, args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	cmd := newRootCommand(env{Stdin: stdin, Stdout: &out, Stderr: &errs})
	cmd.SetArgs(append([]string{"replay"}, args...))
	err = cmd.ExecuteContext(ctx)
	return out.String(), errs.String(), err
}

func TestReplayWritesJSONForPrograms(t *testing.T) {
	t.Parallel()
	out, _, err := replayed(t.Context(), nil, replayLog, "--key-by", "ip", "--capacity", "3", "--rate", "10/m", "--top",
		"2", "-o", "json")
	require.NoError(t, err)
	require.JSONEq(t, `{
		"total": {"requests": 22, "admitted": 13, "denied": 9, "keys": 3, "unparsed": 1},
		"span": {"from": "2026-03-02T08:59:50Z", "to": "2026-03-02T09:00:32Z", "seconds": 42, "out_of_order": 1},
		"policy": {"capacity": 3, "rate": "10/m", "key_by": "ip"},
		"peak": {"at": "2026-03-02T09:00:00Z", "requests": 5, "denied": 1},
		"top": [
			{"key": "192.0.2.10", "requests": 15, "admitted": 6, "denied": 9},
			{"key": "2001:db8::1", "requests": 4, "admitted": 4, "denied": 0}
		],
		"unparsed_samples": [{"line": 10, "reason": "no time in brackets"}]
	}`, out)
}

func TestReplayWritesATableForPeople(t *testing.T) {
	t.Parallel()
	want, err := os.ReadFile("testdata/replay.txt")
	require.NoError(t, err)
	out, errs, err := replayed(t.Context(), nil, replayLog, "--key-by", "ip", "--capacity", "3", "--rate", "10/m")
	require.NoError(t, err)
	require.Empty(t, errs, "no progress unless on a terminal")
	require.Equal(t, trimLines(string(want)), trimLines(out))
}

// trimLines drops spaces at the ends of lines.
func trimLines(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n")
}

func TestReplayReadsStandardInputAndGzip(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(replayLog)
	require.NoError(t, err)
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err = w.Write(text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	file := filepath.Join(t.TempDir(), "log")
	require.NoError(t, os.WriteFile(file, packed.Bytes(), 0o600))

	flags := []string{"--capacity", "3", "--rate", "10/m", "-o", "json"}
	want, _, err := replayed(t.Context(), nil, append(flags, replayLog)...)
	require.NoError(t, err)
	for name, stdin := range map[string]io.Reader{file: nil, "-": bytes.NewReader(text)} {
		got, _, err := replayed(t.Context(), stdin, append(flags, name)...)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

func TestReplayRefusesALogThatBeginsWithItsNewestLine(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(replayLog)
	require.NoError(t, err)
	reversed := strings.Split(strings.TrimSpace(string(text)), "\n")
	slices.Reverse(reversed)
	_, _, err = replayed(t.Context(), strings.NewReader(strings.Join(reversed, "\n")), "-", "--capacity", "3", "--rate",
		"10/m")
	require.ErrorContains(t, err, "tac LOG | consumer replay -")
}

func TestReplayPacesByTheWallClockAndShowsProgress(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		out, errs, err := replayed(t.Context(), nil, replayLog, "--capacity", "3", "--rate", "10/m", "--speed", "2x",
			"--progress", "-o", "json")
		require.NoError(t, err)
		require.Equal(t, 21*time.Second, time.Since(start), "the log's 42 seconds at double speed")
		require.Contains(t, out, `"admitted": 13`)
		require.Contains(t, errs, "2026-03-02 09:00:08 UTC, 19 requests, 47.4 % denied")
		require.True(t, strings.HasSuffix(errs, "\r\x1b[K"), "the progress line is erased")
	})
}

func TestReplayThatIsStoppedReportsWhatItReplayed(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	stdin, writer := io.Pipe()
	t.Cleanup(func() { _ = writer.Close() })
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		_, _ = io.WriteString(writer, `192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1`+"\n")
		cancel() // the log has not ended, but has no more lines
	}()
	out, _, err := replayed(ctx, stdin, "-", "--capacity", "3", "--rate", "10/m", "-o", "json")
	<-wrote
	require.ErrorIs(t, err, context.Canceled)
	var report map[string]any
	require.NoError(t, json.Unmarshal([]byte(out), &report))
	require.Contains(t, report, "total")
}

func TestReplayRefusesWrongUsageNamingFlagAndRange(t *testing.T) {
	t.Parallel()
	good := []string{replayLog, "--capacity", "3", "--rate", "10/m"}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{}, []string{"LOG|-"}},
		{append(good, "another"), []string{"\"another\": want"}},
		{[]string{replayLog, "--rate", "1/s"}, []string{"--capacity is missing", "from 1 to"}},
		{[]string{replayLog, "--capacity", "3"}, []string{"--rate is missing", "10/m"}},
		{append(good, "--capacity", "0"), []string{"--capacity", "from 1 to 1125899906842624"}},
		{append(good, "--capacity", "1.5"), []string{"--capacity", "from 1 to 1125899906842624"}},
		{append(good, "--rate", "0/s"), []string{"--rate", "from 1 to 1125899906842624"}},
		{append(good, "--rate", "5/parsec"), []string{"--rate", "us, ms, s, m, h, d"}},
		{append(good, "--speed", "fast"), []string{"--speed", "0.001x to 1000000x"}},
		{append(good, "--top", "-1"), []string{"--top", "from 0 to 10000"}},
		{append(good, "-o", "xml"), []string{"--output", "table or json"}},
		{append(good, "--key-by", "a..b"), []string{"--key-by", "ip, user"}},
		{append(good, "--capacity", "1125899906842624", "--rate", "1/24h"), []string{"--capacity", "below 2^61"}},
		{append(good, "--nope"), []string{"--nope"}},
	} {
		out, _, err := replayed(t.Context(), nil, c.args...)
		var usage cli.UsageError
		require.ErrorAs(t, err, &usage, "%v", c.args)
		require.Empty(t, out)
		for _, want := range c.want {
			require.Contains(t, err.Error(), want)
		}
	}
}

func TestReplayOfWhatIsNoLogIsAnErrorAndNotWrongUsage(t *testing.T) {
	t.Parallel()
	for log, want := range map[string]string{
		"testdata/none.log": "no such file",
		".":                 "is a directory",
		"../../go.mod":      "no request in",
	} {
		_, _, err := replayed(t.Context(), nil, log, "--capacity", "3", "--rate", "10/m")
		require.ErrorContains(t, err, want)
		var usage cli.UsageError
		require.NotErrorAs(t, err, &usage)
	}
}

func TestReplayTableDoesNotLetALogSteerTheTerminal(t *testing.T) {
	t.Parallel()
	line := `{"ts":1,"k":"\u001b[2J\r` + strings.Repeat("x", 100) + `"}` + "\n"
	out, _, err := replayed(t.Context(), strings.NewReader(line+line), "-", "--key-by", "k", "--capacity", "1", "--rate",
		"1/m")
	require.NoError(t, err)
	require.Contains(t, out, `"\x1b[2J\rxxx`)
	require.NotContains(t, out, "\x1b")
	require.NotContains(t, out, strings.Repeat("x", maxKeyWidth))
}
