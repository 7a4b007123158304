package terminal_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

func TestCutNeverShowsPartOfANumber(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		line  string
		width int
		want  string
	}{
		{"checkout 12/1000", 0, "checkout 12/1000"},
		{"checkout 12/1000", 16, "checkout 12/1000"},
		{"checkout 12/1000", 15, "checkout …"},
		{"checkout 12/1000", 12, "checkout …"},
		{"checkout 12/1000", 8, "checkou…"},
		{"33,000 tokens of 33,551", 22, "33,000 tokens of …"},
		{"\x1b[31m12345\x1b[0m end", 8, "\x1b[31m12345\x1b[0m e…"},
		{"\x1b[31m12345\x1b[0m", 4, "\x1b[31m…\x1b[0m"},
		{"日本語のキー", 6, "日本…"},
	} {
		require.Equal(t, c.want, terminal.Cut(c.line, c.width), "%q at %d", c.line, c.width)
	}
}

func TestTextQuotesWhatCannotBePrinted(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"user:42": "user:42", "日本語": "日本語", "a b": "a b", `a"b`: `a"b`,
		"a\x1b[31mb": `"a\x1b[31mb"`, "a\nb": `"a\nb"`, "\xff": `"\xff"`, "a\u202eb": `"a\u202eb"`,
		"\u009b31m": `"\u009b31m"`,
	} {
		require.Equal(t, want, terminal.Text(text))
	}
}

func TestWrapBreaksBetweenWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"one two three four", "five six"}, terminal.Wrap("one two three four five six", 20))
	require.Equal(t, []string{"one two"}, terminal.Wrap("one two", 0))
}

func buckets(key string) *terminal.Table {
	table := terminal.NewTable(terminal.Column{Name: "BUCKET", Text: true}, terminal.Column{Name: "TOKENS", Right: true},
		terminal.Column{Name: "INDEX", Right: true, Spare: 2}, terminal.Column{Name: "AGE", Right: true, Spare: 1})
	table.Row(key, 1234567, 99, "5 ms")
	table.Row("b", 3, 1, "70 ms")
	table.Span("c", "WRONGTYPE its key holds a list of 1234567890 elements")
	return table
}

func written(t *testing.T, table *terminal.Table, width int) string {
	var out bytes.Buffer
	require.NoError(t, table.Write(&out, width))
	return out.String()
}

func TestATableCutsTextsFirstThenLeavesColumnsOut(t *testing.T) {
	t.Parallel()
	require.Equal(t, ""+
		"BUCKET               TOKENS  INDEX    AGE\n"+
		"checkout:europe:42  1234567     99   5 ms\n"+
		"b                         3      1  70 ms\n"+
		"c                   WRONGTYPE its key holds a list of 1234567890 elements\n",
		written(t, buckets("checkout:europe:42"), 0))
	require.Equal(t, ""+
		"BUCKET       TOKENS  INDEX    AGE\n"+
		"checkout:…  1234567     99   5 ms\n"+
		"b                 3      1  70 ms\n"+
		"c           WRONGTYPE its key ho…\n", written(t, buckets("checkout:europe:42"), 33))
	require.Equal(t, ""+
		"BUCKET     TOKENS    AGE\n"+
		"checkou…  1234567   5 ms\n"+
		"b               3  70 ms\n"+
		"c         WRONGTYPE its…\n", written(t, buckets("checkout:europe:42"), 24))
}

func TestFlowBreaksBetweenItems(t *testing.T) {
	t.Parallel()
	items := []string{"checkout 12/1000", "\x1b[31mmail\x1b[0m 2/20", "digest 5/5"}
	require.Equal(t, []string{items[0] + "  " + items[1], items[2]}, terminal.Flow(items, "  ", 30))
	require.Equal(t, []string{strings.Join(items, "  ")}, terminal.Flow(items, "  ", 0))
	require.Equal(t, items, terminal.Flow(items, "  ", 5))
}

func TestPairsAreBesideEachOther(t *testing.T) {
	t.Parallel()
	pairs := []terminal.Pair{{"redis", "one two three four five six"}, {"", "more"}, {"at", "7"}}
	var out bytes.Buffer
	require.NoError(t, terminal.WritePairs(&out, 30, pairs))
	require.Equal(t, "redis  one two three four five\n       six\n       more\nat     7\n", out.String())
	out.Reset()
	require.NoError(t, terminal.WritePairs(&out, 0, pairs))
	require.Equal(t, "redis  one two three four five six\n       more\nat     7\n", out.String())
}

func TestPairsShowNoControlCharacters(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	pairs := []terminal.Pair{{"alive", "a\x1b[31mb leads, \x9b é → \xff"}, {"error", "one\ntwo"}}
	require.NoError(t, terminal.WritePairs(&out, 0, pairs))
	require.Equal(t, "alive  a\\x1b[31mb leads, \\x9b é → \\xff\nerror  one\n       two\n", out.String())
}

func TestATableFitsEveryWidthItCan(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		key, width := rapid.String().Draw(t, "key"), rapid.IntRange(20, 120).Draw(t, "width")
		var out bytes.Buffer
		require.NoError(t, buckets(key).Write(&out, width))
		require.NotContains(t, out.String(), "\x1b")
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		require.Len(t, lines, 4)
		for _, line := range lines {
			require.LessOrEqual(t, ansi.StringWidth(line), width, line)
		}
		require.Contains(t, lines[1], "1234567", "no number is cut")
	})
}

func TestWhatIsNoTerminalHasNoWidthAndNoColors(t *testing.T) {
	t.Parallel()
	s := terminal.Of(&bytes.Buffer{}, nil)
	require.False(t, s.Rewrites())
	require.False(t, s.Colors())
	require.Zero(t, s.Width())
}

func TestSparkDrawsPartsOfAWhole(t *testing.T) {
	t.Parallel()
	var parts []*float64
	for _, p := range []float64{0, 0.07, 0.08, 0.5, 0.92, 0.93, 1, -1, 2} {
		parts = append(parts, &p)
	}
	require.Equal(t, "▁▁▂▅▇██▁█·", terminal.Spark(append(parts, nil)))
	require.Empty(t, terminal.Spark(nil))
}
