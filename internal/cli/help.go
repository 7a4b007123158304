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
	// allAnnotation is an annotation of the root command. It is set if --help-all was given.
	allAnnotation = "refiller_help_all"
)

// allHelp is the flag for a help that shows the flags of every group.
const allHelp = "--help-all"

const (
	helpWidth = 80 // columns of a line if the output is not a terminal
	maxName   = 26 // columns of a name; after a longer name, the description begins on the next line
	minText   = 20 // the smallest number of columns of a description
)

// writeHelp writes a command's help in lines as wide as the terminal. It fills each paragraph of the command's text,
// except a paragraph that begins with an indented line.
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

// flags writes the flags that are in no group. With --help-all it also writes the flags of each group. Otherwise it
// writes the number of flags in the groups.
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
	h.paragraphs(fmt.Sprintf("There are more flags for %s. To list them, run: %s %s", strings.Join(further, ", "),
		cmd.CommandPath(), allHelp))
}

// Group puts flags of a command into a group with a title. The help lists these flags only with --help-all. A name with
// a dash at its end is a prefix: it selects all flags that begin with it.
func Group(cmd *cobra.Command, title string, names ...string) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		for _, name := range names {
			if f.Name == name || strings.HasSuffix(name, "-") && strings.HasPrefix(f.Name, name) {
				_ = cmd.Flags().SetAnnotation(f.Name, groupAnnotation, []string{title}) // can't fail, because the flag exists
			}
		}
	})
}

// withHelp replaces --help-all in the arguments by --help. It records the flag in the root's annotations.
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

// list writes entries below a title in two columns: the names and the descriptions.
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

// describe returns a flag and its description in pflag's format. The description includes the default.
func describe(f *pflag.Flag) [2]string {
	single := pflag.NewFlagSet("", pflag.ContinueOnError)
	single.AddFlag(f)
	line := single.FlagUsages() // six columns for the short name, then the name, then three spaces
	name, usage, _ := strings.Cut(line[6:], "   ")
	return [2]string{line[:6] + name, usage}
}
