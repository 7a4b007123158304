package docs

import (
	"fmt"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	linkTo    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	namedTest = regexp.MustCompile(`(-run |-bench )?\b((?:Test|Benchmark|Fuzz|Example)[A-Z]\w+)`)
	ofTest    = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w+)`)
	notInSlug = regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
)

// prose returns the text of a document without its code blocks.
func prose(document string) string {
	var b strings.Builder
	code := false
	for line := range strings.Lines(document) {
		if strings.HasPrefix(line, "```") {
			code = !code
		} else if !code {
			b.WriteString(line)
		}
	}
	return b.String()
}

// anchors returns the anchors that GitHub makes for the headings of a document.
func anchors(document string) map[string]bool {
	all := map[string]bool{}
	for line := range strings.Lines(prose(document)) {
		if heading := strings.TrimLeft(line, "#"); heading != line && strings.HasPrefix(heading, " ") {
			slug := notInSlug.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), "")
			slug = strings.ReplaceAll(slug, " ", "-")
			base := slug
			for n := 1; all[slug]; n++ {
				slug = fmt.Sprintf("%s-%d", base, n)
			}
			all[slug] = true
		}
	}
	return all
}

// broken returns the links of a document that lead nowhere. It calls read for other files of the repository.
func broken(document, text string, read func(path string) (string, error)) (bad []string) {
	for _, m := range linkTo.FindAllStringSubmatch(prose(text), -1) {
		to, err := url.Parse(m[1])
		if err != nil || to.Scheme != "" {
			continue // a link to another site
		}
		target, content := document, text
		if to.Path != "" {
			target = path.Join(path.Dir(document), to.Path)
			content, err = read(target)
		}
		if err != nil || to.Fragment != "" && (path.Ext(target) != ".md" || !anchors(content)[to.Fragment]) {
			bad = append(bad, m[1])
		}
	}
	return bad
}

// unknownTests returns the tests that a text names and that don't exist. The word after -run or -bench may be the
// beginning of a name. TestName and FuzzName are placeholders.
func unknownTests(text string, tests []string) (bad []string) {
	for _, m := range namedTest.FindAllStringSubmatch(prose(text), -1) {
		is := func(test string) bool { return test == m[2] || m[1] != "" && strings.HasPrefix(test, m[2]) }
		if !slices.ContainsFunc(tests, is) && m[2] != "TestName" && m[2] != "FuzzName" {
			bad = append(bad, m[2])
		}
	}
	return bad
}

// readAt reads a file of the repository, or nothing if it is a directory.
func readAt(path string) (string, error) {
	if info, err := os.Stat("../../" + path); err != nil || info.IsDir() {
		return "", err
	}
	text, err := os.ReadFile("../../" + path)
	return string(text), err
}

func TestLinksOfTheDocumentationLeadSomewhereAndItsTestsExist(t *testing.T) {
	t.Parallel()
	var tests []string
	sources(t, func(path string, text []byte) {
		if strings.HasSuffix(path, "_test.go") {
			for _, m := range ofTest.FindAllSubmatch(text, -1) {
				tests = append(tests, string(m[1]))
			}
		}
	})
	require.Greater(t, len(tests), 500)
	links := 0
	documents(t, func(path, text string) {
		links += len(linkTo.FindAllString(text, -1))
		require.Empty(t, broken(path, text, readAt), "%s: these links have no target", path)
		require.Empty(t, unknownTests(text, tests), "%s: there are no such tests", path)
	})
	require.Greater(t, links, 100)
}

func TestALinkThatLeadsNowhereIsFound(t *testing.T) {
	t.Parallel()
	text := "# One\n## `a.b`, c_d: e\n## One\n[1](#one) [2](#one-1) [3](#ab-c_d-e) [4](#two) [5](other.md#there)\n" +
		"[6](other.md#away) [7](gone.md) [8](../LICENSE) [9](https://example.com/#x)\n```go\nf[x](y)\n```\n"
	read := func(path string) (string, error) {
		switch path {
		case "docs/other.md":
			return "### There\n```sh\n# away\n```\n", nil
		case "LICENSE":
			return "", nil
		}
		return "", os.ErrNotExist
	}
	require.Equal(t, []string{"#two", "other.md#away", "gone.md"}, broken("docs/page.md", text, read))
	require.Equal(t, []string{"TestTwo", "TestOn"},
		unknownTests("`TestOne`, `TestTwo`, `-run TestOn`, `TestOn`, `TestName`", []string{"TestOne"}))
}
