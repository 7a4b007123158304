package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// ManCommand returns a command that writes the manual pages of a program: one for the program and one for each command.
func ManCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIR",
		Short: "Write the manual pages into a directory",
		Long: `Write the manual pages (section 1) of the program and of each of its commands into the directory DIR. The
directory is created if it doesn't exist. "man -l DIR/NAME.1" shows a page. So that "man NAME" finds the pages, use a
directory man1 in the search path of man, such as /usr/local/share/man/man1.`,
		Args: Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("manual pages: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true // otherwise each page would contain the current date
			header := doc.GenManHeader{Section: "1", Source: root.Name() + " " + Version(), Manual: root.Name()}
			if err := doc.GenManTree(root, &header, args[0]); err != nil {
				return fmt.Errorf("manual pages: %w", err)
			}
			return nil
		},
	}
}
