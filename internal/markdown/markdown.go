// Package markdown finds the code blocks of the project's documentation, for the tests that run them.
//
// What stands after the three backticks is a language and then words about the block, separated by spaces:
//
//	file=NAME   the block is that file
//	cluster     it needs a cluster of Kubernetes, containers or servers that a test doesn't have
//	long        it runs until it is stopped, takes minutes, or changes the machine
package markdown

import (
	"fmt"
	"slices"
	"strings"
)

// Block is one code block.
type Block struct {
	Line     int    // of the opening backticks, from 1
	Language string // "" if none is given
	Words    []string
	Text     string // with the line feed at its end
}

// Has reports whether the word is among those about the block.
func (b Block) Has(word string) bool { return slices.Contains(b.Words, word) }

// File is the name of the file that the block is, if it is one.
func (b Block) File() string {
	for _, w := range b.Words {
		if name, ok := strings.CutPrefix(w, "file="); ok {
			return name
		}
	}
	return ""
}

// Command is one command of a block of shell commands, and what follows it.
type Command struct {
	Text   string
	Output string // of a console: the lines up to the next command
}

// Commands are those of the block. In a console they stand after "$ ", and what they print follows; elsewhere each
// line is one, unless it is empty or a comment. A backslash at the end of a line continues it.
func (b Block) Commands() []Command {
	var all []Command
	continued := false
	for line := range strings.Lines(b.Text) {
		command, isCommand := strings.CutPrefix(line, "$ ")
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
			all = append(all, Command{Text: command})
		}
		continued = strings.HasSuffix(line, "\\\n")
	}
	return all
}

// Blocks are the code blocks of a document.
func Blocks(document string) ([]Block, error) {
	var all []Block
	var open *Block
	number := 0
	for line := range strings.Lines(document) {
		number++
		info, fence := strings.CutPrefix(strings.TrimRight(line, "\n"), "```")
		switch {
		case fence && open == nil:
			words := strings.Fields(info)
			open = &Block{Line: number}
			if len(words) > 0 {
				open.Language, open.Words = words[0], words[1:]
			}
		case fence:
			all = append(all, *open)
			open = nil
		case open != nil:
			open.Text += line
		case strings.HasPrefix(strings.TrimSpace(line), "```"):
			return nil, fmt.Errorf("markdown: line %d: a code block begins at the start of a line", number)
		}
	}
	if open != nil {
		return nil, fmt.Errorf("markdown: line %d: the code block has no end", open.Line)
	}
	return all, nil
}
