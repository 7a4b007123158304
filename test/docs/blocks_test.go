package docs

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// block is one code block.
type block struct {
	Line     int    // line of the opening backticks, from 1
	Language string // "" if none is given
	Words    []string
	Text     string // with the line feed at its end
}

// has reports whether the block has a word.
func (b block) has(word string) bool { return slices.Contains(b.Words, word) }

// file returns the name of the file whose content the block is, or the empty string.
func (b block) file() string {
	for _, w := range b.Words {
		if name, ok := strings.CutPrefix(w, "file="); ok {
			return name
		}
	}
	return ""
}

// command is one command of a block, with the output that the document shows.
type command struct {
	Text   string
	Output string // in a block of language console: the lines up to the next command
}

// commands returns the commands of the block. In a block of language console, a command follows "$ ", and its output
// follows the command. In other blocks, each line is a command, unless it is empty or a comment. A backslash at the end
// of a line continues the command.
func (b block) commands() []command {
	var all []command
	continued := false
	for line := range strings.Lines(b.Text) {
		text, isCommand := strings.CutPrefix(line, "$ ")
		switch {
		case continued:
			all[len(all)-1].Text += line
		case b.Language == "console" && !isCommand:
			if len(all) > 0 {
				all[len(all)-1].Output += line
			}
			continue
		case strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#"):
			continue
		default:
			all = append(all, command{Text: text})
		}
		continued = strings.HasSuffix(line, "\\\n")
	}
	return all
}

// parseBlocks returns the code blocks of a document.
func parseBlocks(document string) ([]block, error) {
	var all []block
	var open *block
	number := 0
	for line := range strings.Lines(document) {
		number++
		info, fence := strings.CutPrefix(strings.TrimRight(line, "\n"), "```")
		switch {
		case fence && open == nil:
			words := strings.Fields(info)
			open = &block{Line: number}
			if len(words) > 0 {
				open.Language, open.Words = words[0], words[1:]
			}
		case fence:
			all = append(all, *open)
			open = nil
		case open != nil:
			open.Text += line
		case strings.HasPrefix(strings.TrimSpace(line), "```"):
			return nil, fmt.Errorf("line %d: a code block begins at the start of a line", number)
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: the code block has no end", open.Line)
	}
	return all, nil
}

func TestBlocksHaveTheirLanguageWordsAndCommands(t *testing.T) {
	t.Parallel()
	blocks, err := parseBlocks(
		"text\n```console cluster file=a.sh\n$ one \\\n  two\nout\n$ three\n```\n" +
			"```\ndrawing\n```\n```sh\n# why\n\nfour\n```\n",
	)
	require.NoError(t, err)
	require.Len(t, blocks, 3)
	require.Equal(t, "console", blocks[0].Language)
	require.Equal(t, "a.sh", blocks[0].file())
	require.True(t, blocks[0].has("cluster"))
	require.Equal(t, []command{{Text: "one \\\n  two\n", Output: "out\n"}, {Text: "three\n"}}, blocks[0].commands())
	require.Equal(t, block{Line: 8, Text: "drawing\n"}, blocks[1])
	require.Equal(t, []command{{Text: "four\n"}}, blocks[2].commands())
}

func TestABlockWithoutAnEndIsRefused(t *testing.T) {
	t.Parallel()
	_, err := parseBlocks("text\n```sh\necho\n")
	require.ErrorContains(t, err, "line 2")
	_, err = parseBlocks("- item\n  ```sh\n  echo\n  ```\n")
	require.ErrorContains(t, err, "line 2")
}
