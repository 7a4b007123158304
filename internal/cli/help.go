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

// Annotations: of a flag, the title of the group that --help-all shows it in; of a program, that it was given.
const (
	groupAnnotation = "refiller_group"
	allAnnotation   = "refiller_help_all"
)

// allHelp is the flag for a help that has the flags of every group.
const allHelp = "--help-all"

const (
	helpWidth = 80 // where the output is no terminal
	maxName   = 26 // columns of a flag; what is said of a longer one begins on the next line
	minText   = 20 // columns of what is said of it
)

// writeHelp writes a command's help, as wide as the terminal. Consecutive lines of its text are a paragraph, which is
// filled, unless the first is indented.
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

// flags writes the flags that are in no group, and those of groups if all are asked for.
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

// Group puts flags of a command into a group, which its help lists only if asked for all. A name that ends with a dash
// means all flags that begin so.
func Group(cmd *cobra.Command, title string, names ...string) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		for _, name := range names {
			if f.Name == name || strings.HasSuffix(name, "-") && strings.HasPrefix(f.Name, name) {
				_ = cmd.Flags().SetAnnotation(f.Name, groupAnnotation, []string{title}) // there is such a flag
			}
		}
	})
}

// withHelp returns the arguments with --help in place of --help-all, which it records at the root.
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
