package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// documents calls visit for every Markdown file of the repository.
func documents(t *testing.T, visit func(path, text string)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (name == "dist" || name == "bin" || name == "testdata" || strings.HasPrefix(name, ".") &&
			name != ".."):
			return filepath.SkipDir
		case filepath.Ext(name) == ".md":
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			visit(strings.TrimPrefix(filepath.ToSlash(path), "../../"), string(text))
		}
		return nil
	}))
}

// Every code block is run, compiled or decoded. If a test can't run a block, a word after the backticks says why, and
// the names in the block are checked. TestTutorialsFollowTheReadmeInOneShell runs the blocks of the README.
func TestCodeBlocksOfTheDocumentationRun(t *testing.T) {
	t.Parallel()
	documents(t, func(path, text string) {
		blocks, err := parseBlocks(text)
		require.NoError(t, err, path)
		if len(blocks) == 0 || path == newcomersPages[0] {
			return
		}
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			var s *session
			shell := func() *session {
				if s == nil {
					s = newSession(t, text)
					if prepare := scenes[path]; prepare != nil {
						prepare(s)
					}
				}
				return s
			}
			for _, b := range blocks {
				if name := b.file(); name != "" {
					shell().write(name, b.Text)
				}
				check(t, b, shell)
			}
		})
	})
}

// newcomersPages are the pages that a newcomer reads, in this order.
var newcomersPages = []string{"README.md", "docs/tutorials/sdk.md", "docs/tutorials/llm.md", "docs/tutorials/pool.md",
	"docs/tutorials/kubernetes.md"}

// A newcomer follows the README and then the tutorials, in one shell. So each page must stop the programs that it
// started, and the keys that it leaves in Redis must not change the output of later pages.
func TestTutorialsFollowTheReadmeInOneShell(t *testing.T) {
	t.Parallel()
	texts := map[string]string{}
	documents(t, func(path, text string) { texts[path] = text })
	all := ""
	for _, page := range newcomersPages {
		require.NotEmpty(t, texts[page], page)
		all += texts[page]
	}
	for path := range texts {
		if filepath.Dir(path) == "docs/tutorials" {
			require.Contains(t, newcomersPages, path)
		}
	}
	s := newSession(t, all)
	// The README needs a running redis-server. The tutorials start one too, which then finds the port in use, as it would
	// for a newcomer.
	s.run(block{Language: "sh", Text: "(redis-server --port 6379 --save '' >redis-readme.log &)\n" +
		"export REFILLER_REDIS_URL=redis://127.0.0.1:6379/0 REFILLER_LISTEN=127.0.0.1:9090\n" +
		"until grep -q 'Ready to accept' redis-readme.log; do sleep 0.1; done\n"})
	for i, page := range newcomersPages {
		blocks, err := parseBlocks(texts[page])
		require.NoError(t, err, page)
		for _, b := range blocks {
			if name := b.file(); name != "" {
				s.write(name, b.Text)
			}
			if i == 0 || b.Language == "sh" || b.Language == "console" { // the tests of the pages check the other blocks
				check(t, b, func() *session { return s })
			}
		}
	}
}

// check runs a block, or checks the names in it.
func check(t *testing.T, b block, shell func() *session) {
	t.Helper()
	elsewhere := b.has("cluster") || b.has("long") || b.has("recipe")
	switch b.Language {
	case "text", "": // drawings, and the output of long runs
		require.NotEmpty(t, b.Language, "line %d: a block needs a language; \"text\" is one", b.Line)
	case "yaml":
		checkYAML(t, b)
	case "go":
		checkGo(t, b)
	case "sh", "console":
		require.NotEmpty(t, b.commands(), "line %d", b.Line)
		if !elsewhere {
			shell().run(b)
			return
		}
		for _, c := range b.commands() {
			checkCommand(t, c.Text)
		}
	default:
		t.Fatalf("line %d: blocks of %q can't be tested", b.Line, b.Language)
	}
}

// scenes prepare the shells of documents that expect programs to run, or variables to be set.
var scenes = map[string]func(*session){
	"docs/sidecar.md": func(s *session) { // a longer deadline, for a busy machine
		s.run(block{Language: "sh", Text: "export REFILLER_SERVE_DEADLINE=5s\n"})
	},
	"docs/templates.md": func(s *session) {
		s.write("config.yaml", `
redis: {url: "redis://localhost:6379"}
version: 1
templates: [{prefix: "user:", capacity: 60, rate: 1/s}]
listen: localhost:9090
`)
		s.run(
			block{
				Language: "sh",
				Text:     "refiller run --config config.yaml 2>refiller.log &\nconsumer take user:42 -n 43\n",
			},
		)
	},
}
