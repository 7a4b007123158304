package docs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// columns is the largest number of characters in a line. A tab counts as one character.
const columns = 120

// longLines has the largest number of longer lines in each directory that still has some. The numbers only fall.
var longLines = map[string]int{
	"bench":                     1,
	"bench/scalechart":          2,
	"cmd/consumer":              2,
	"cmd/refiller":              6,
	"deploy/k8s":                4,
	"fetch":                     1,
	"internal/replay/accesslog": 6,
	"internal/config":           11,
	"internal/dev":              1,
	"internal/config/fields":    3,
	"internal/operate/metrics":  5,
	"internal/config/redisconn": 1,
	"internal/replica":          3,
	"internal/sidecar/envoy":    5,
	"internal/testing/testenv":  1,
	"lua":                       1,
	"policy":                    1,
	"refill":                    1,
	"scripts":                   6,
	"test/operate":              13,
	"test/scale":                4,
}

// sources calls visit for every file of the repository that isn't generated.
func sources(t *testing.T, visit func(path string, text []byte)) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = "../.."
	out, err := list.Output()
	require.NoError(t, err)
	for path := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		switch filepath.Ext(path) {
		case ".go", ".md", ".lua", ".sh", ".proto": // a Makefile's help and a Dockerfile's labels need long lines
		default:
			continue
		}
		if strings.HasSuffix(path, ".pb.go") || strings.Contains(path, "testdata/") || filepath.Base(path) == "LICENSE" {
			continue
		}
		text, err := os.ReadFile("../../" + path)
		if os.IsNotExist(err) { // deleted, and not yet committed
			continue
		}
		require.NoError(t, err)
		visit(path, text)
	}
}

// TestLinesFit checks that lines have at most 120 columns. In Markdown it skips tables, code blocks and addresses,
// because their lines can't be broken.
func TestLinesFit(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	sources(t, func(path string, text []byte) {
		dir, code := filepath.Dir(path), false
		if filepath.Ext(path) == ".md" {
			dir = path
		}
		for i, line := range strings.Split(string(text), "\n") {
			fence := strings.HasPrefix(line, "```")
			code = code != fence
			if filepath.Ext(path) == ".md" &&
				(code || fence || strings.HasPrefix(line, "|") || !strings.Contains(strings.TrimSpace(line), " ")) {
				continue
			}
			if utf8.RuneCountInString(line) <= columns {
				continue
			}
			found[dir]++
			if found[dir] > longLines[dir] {
				t.Errorf("%s:%d has more than %d columns", path, i+1, columns)
			}
		}
	})
	for dir, n := range longLines {
		if found[dir] < n {
			t.Logf("%s has %d long lines now: lower its number", dir, found[dir])
		}
	}
}

// TestWordsOfTheGlossary rejects words that the glossary replaces.
func TestWordsOfTheGlossary(t *testing.T) {
	t.Parallel()
	glossary, err := os.ReadFile("../../docs/glossary.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(glossary), "\n## Replaced words\n")
	require.True(t, found)
	var words []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^|]+)` \\|").FindAllStringSubmatch(section, -1) {
		words = append(words, strings.ReplaceAll(row[1], "`, `", "|"))
	}
	require.Greater(t, len(words), 10)
	banned := regexp.MustCompile(`(?i)\b(` + strings.Join(words, "|") + `)s?\b`)
	sources(t, func(path string, text []byte) {
		if path == "docs/glossary.md" {
			return
		}
		for i, line := range bytes.Split(text, []byte("\n")) {
			if m := banned.Find(line); m != nil {
				t.Errorf("%s:%d says %q, which the glossary replaces", path, i+1, m)
			}
		}
	})
}

// wordBudgets has, for each directory that still uses words that CONTRIBUTING.md replaces, how often it may use them.
// The numbers only fall. In the end, words remain only in another sense, such as "takes in a window", or in quotes.
var wordBudgets = map[string]int{
	".":                           17,
	"cmd/refiller":                5,
	"deploy/k8s":                  1,
	"docs":                        8,
	"fetch":                       3,
	"internal/config":             1,
	"internal/config/fields":      1,
	"internal/dev":                1,
	"internal/operate/admin":      3,
	"internal/operate/doctor":     2,
	"internal/operate/drift":      4,
	"internal/operate/membership": 4,
	"internal/operate/stats":      1,
	"internal/sidecar/envoy":      2,
	"internal/testing/testenv":    1,
	"limit/window":                3,
	"lua":                         2,
	"policy":                      2,
	"pool":                        1,
	"refill":                      7,
	"refill/flow":                 1,
	"test/languages":              1,
	"test/operate":                4,
	"test/pools":                  1,
	"test/robustness":             1,
	"test/robustness/faults":      1,
	"test/robustness/record":      4,
	"test/robustness/system":      1,
	"test/robustness/verify":      3,
}

// replacedWords matches the words and phrases that wordBudgets counts, in all their forms.
var replacedWords = regexp.MustCompile(`\b(?:look(?:s|ed|ing)?|learn(?:s|ed|t|ing)?|tell(?:s|ing)?|told|` +
	`not(?:e|es|ed|ing)|hear(?:s|d|ing)?|saw|stand(?:s|ing)?|stood|tak(?:e|es|en|ing) in|took in|apart|` +
	`nobody|somebody|someone|whoever|(?:is|are|was|were) (?:gone|away))\b`)

// camelCase matches the place between two words of a name.
var camelCase = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// TestReplacedWordsBecomeFewer counts the words of replacedWords in Go, Lua and Markdown files. It counts them in
// comments, strings and names. A name such as learnFlows counts as two words.
func TestReplacedWordsBecomeFewer(t *testing.T) {
	t.Parallel()
	found := map[string]int{}
	sources(t, func(path string, text []byte) {
		switch filepath.Ext(path) {
		case ".go", ".lua", ".md":
		default:
			return
		}
		if path == "test/docs/language_test.go" {
			return
		}
		dir := filepath.Dir(path)
		for i, line := range bytes.Split(text, []byte("\n")) {
			words := bytes.ToLower(camelCase.ReplaceAll(line, []byte("$1 $2")))
			for _, word := range replacedWords.FindAll(words, -1) {
				found[dir]++
				if found[dir] > wordBudgets[dir] {
					t.Errorf("%s:%d says %q: %s may use such words %d times", path, i+1, word, dir, wordBudgets[dir])
				}
			}
		}
	})
	for dir, n := range wordBudgets {
		if found[dir] < n {
			t.Logf("%s uses %d replaced words now: lower its budget", dir, found[dir])
		}
	}
}
