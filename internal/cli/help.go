package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	// groupAnnotation is the annotation of a flag with the title of its group.
	groupAnnotation = "refiller_group"
	// allAnnotation is an annotation of the root command. It is there if --help-all was given.
	allAnnotation = "refiller_help_all"
)

// allHelp is the flag that shows the help with the flags of every group.
const allHelp = "--help-all"

const (
	helpWidth = 80 // columns of a line if the output is no terminal
	maxName   = 26 // columns of a name; the description of a longer one begins on the next line
	minText   = 20 // columns that a description has at least
)

// writeHelp writes a command's help, as wide as the terminal. Each paragraph of its text is filled, unless it begins
// with an indented line.
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
	var commands [][2]string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() || sub.Name() == "help" {
			commands = append(commands, [2]string{"  " + sub.Name(), sub.Short})
		}
	}
	h.list("Available Commands", commands)
	h.flags(cmd)
	if len(commands) > 0 {
		fmt.Fprintf(&h, "\nUse \"%s [command] --help\" for more information about a command.\n", cmd.CommandPath())
	}
	_, err := io.WriteString(w, h.String())
	return err
}

// helpText collects the text of a help.
type helpText struct {
	strings.Builder
	width int
}

// paragraphs writes a text whose paragraphs are separated by empty lines.
func (h *helpText) paragraphs(text string) {
	for paragraph := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if strings.TrimLeft(paragraph, " \t") == paragraph {
			paragraph = strings.Join(terminal.Flow(strings.Fields(paragraph), " ", h.width), "\n")
		}
		h.WriteString(paragraph + "\n\n")
	}
}

// flags writes the flags that are in no group. With --help-all it also writes those of each group, and otherwise how
// many there are.
func (h *helpText) flags(cmd *cobra.Command) {
	var plain [][2]string
	var titles []string
	groups := map[string][][2]string{}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		of := f.Annotations[groupAnnotation]
		if len(of) == 0 {
			plain = append(plain, describe(f))
			return
		}
		if groups[of[0]] == nil {
			titles = append(titles, of[0])
		}
		groups[of[0]] = append(groups[of[0]], describe(f))
	})
	h.list("Flags", plain)
	if len(titles) == 0 {
		return
	}
	if cmd.Root().Annotations[allAnnotation] != "" {
		for _, title := range titles {
			h.list("Flags for "+title, groups[title])
		}
		return
	}
	var further []string
	for _, title := range titles {
		further = append(further, fmt.Sprintf("%s (%d)", title, len(groups[title])))
	}
	h.WriteString("\n")
	h.paragraphs(fmt.Sprintf("There are more flags for %s: %s %s lists them.", strings.Join(further, ", "),
		cmd.CommandPath(), allHelp))
}

// Group puts flags of a command into a group with a title. The help lists them only with --help-all. A name that ends
// with a dash means all flags that begin with it.
func Group(cmd *cobra.Command, title string, names ...string) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		for _, name := range names {
			if f.Name == name || strings.HasSuffix(name, "-") && strings.HasPrefix(f.Name, name) {
				_ = cmd.Flags().SetAnnotation(f.Name, groupAnnotation, []string{title}) // there is such a flag
			}
		}
	})
}

// withHelp replaces --help-all in the arguments by --help, and records in the root's annotations that it was there.
func withHelp(root *cobra.Command, args []string) []string {
	changed := slices.Clone(args)
	for i, arg := range changed {
		switch arg {
		case "--":
			return changed
		case allHelp:
			changed[i] = "--help"
			root.Annotations = map[string]string{allAnnotation: "true"}
		}
	}
	return changed
}

// list writes entries, each a name and its description, in two columns below a title.
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

// describe returns a flag and its description, both as pflag writes them, with the default.
func describe(f *pflag.Flag) [2]string {
	single := pflag.NewFlagSet("", pflag.ContinueOnError)
	single.AddFlag(f)
	line := single.FlagUsages() // it begins with six columns for the short name, and three spaces follow the name
	name, usage, _ := strings.Cut(line[6:], "   ")
	return [2]string{line[:6] + name, usage}
}
