package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	helpWidth = 80 // where the output is no terminal
	maxName   = 26 // columns of a flag; what is said of a longer one begins on the next line
	minText   = 20 // columns of what is said of it
)

// writeHelp writes a command's help, as wide as the terminal. Lines of its text that stand together are a paragraph,
// which is filled, unless the first is indented.
func writeHelp(w io.Writer, cmd *cobra.Command) error {
	h := helpText{width: terminal.Of(w, nil).Width()}
	if h.width == 0 {
		h.width = helpWidth
	}
	text := cmd.Long
	if text == "" {
		text = cmd.Short
	}
	h.paragraphs(text)
	h.WriteString("Usage:\n")
	if cmd.HasAvailableSubCommands() {
		h.WriteString("  " + cmd.CommandPath() + " [command]\n")
	} else {
		h.WriteString("  " + cmd.UseLine() + "\n")
	}
	if cmd.HasExample() {
		h.WriteString("\nExamples:\n" + cmd.Example + "\n")
	}
	var commands, flags [][2]string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() || sub.Name() == "help" {
			commands = append(commands, [2]string{"  " + sub.Name(), sub.Short})
		}
	}
	h.list("Available Commands", commands)
	cmd.Flags().VisitAll(func(f *pflag.Flag) { flags = append(flags, describe(f)) })
	h.list("Flags", flags)
	if len(commands) > 0 {
		fmt.Fprintf(&h, "\nUse \"%s [command] --help\" for more information about a command.\n", cmd.CommandPath())
	}
	_, err := io.WriteString(w, h.String())
	return err
}

// helpText is the text of a help in the making.
type helpText struct {
	strings.Builder
	width int
}

func (h *helpText) paragraphs(text string) {
	for paragraph := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if strings.TrimLeft(paragraph, " \t") == paragraph {
			paragraph = strings.Join(terminal.Flow(strings.Fields(paragraph), " ", h.width), "\n")
		}
		h.WriteString(paragraph + "\n\n")
	}
}

// list writes names and what is said of them beside each other.
func (h *helpText) list(title string, entries [][2]string) {
	if len(entries) == 0 {
		return
	}
	h.WriteString("\n" + title + ":\n")
	column := 0
	for _, e := range entries {
		column = max(column, min(len(e[0]), maxName)+2)
	}
	for _, e := range entries {
		name := fmt.Sprintf("%-*s", column, e[0])
		if len(e[0]) > column-2 {
			name = e[0] + "\n" + strings.Repeat(" ", column)
		}
		lines := terminal.Flow(strings.Fields(e[1]), " ", max(minText, h.width-column))
		h.WriteString(name + strings.Join(lines, "\n"+strings.Repeat(" ", column)) + "\n")
	}
}

// describe is how pflag writes a flag, with its default, and what it says of it.
func describe(f *pflag.Flag) [2]string {
	alone := pflag.NewFlagSet("", pflag.ContinueOnError)
	alone.AddFlag(f)
	line := alone.FlagUsages() // six columns for the short name come first, and three part the name from the rest
	name, usage, _ := strings.Cut(line[6:], "   ")
	return [2]string{line[:6] + name, usage}
}
