// Package clitest has the tests that the command lines of both programs must pass. It is for tests only.
package clitest

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

const (
	failed    = 1
	usage     = 2
	columns   = 80
	mostFlags = 12
)

// shownFlag matches a flag in a help text.
var shownFlag = regexp.MustCompile(`(?m)^  (-|    -).*`)

// Each returns the strings of others, each with the same arguments before it.
func Each(before string, others []string) []string {
	var list []string
	for _, o := range others {
		list = append(list, before+" "+o)
	}
	return list
}

// ExitCodes checks the exit codes and the help of every command below root. files has the lists of arguments of each
// command; a command without an entry fails the test. ExitCodes runs each command twice for each list: the word FILE is
// replaced first by a missing file, then by a file that can't be read. Both runs must fail, and not as wrong usage. The
// word GOOD is replaced by a file with the text good. An unknown flag must be wrong usage. The help of each command
// must fit into eighty columns. It must show few flags, except with --help-all.
func ExitCodes(
	t *testing.T, root *cobra.Command, files map[string][]string, good string, run func(args []string) (int, string),
) {
	t.Helper()
	require.ElementsMatch(t, leaves(root, ""), slices.Collect(maps.Keys(files)))
	code, said := run([]string{"help", "nonsense"})
	require.Equal(t, usage, code, said)
	require.Contains(t, said, `unknown command "nonsense"`)
	code, said = run([]string{"help", "version"})
	require.Zero(t, code, said)
	require.Contains(t, said, "Print the version")
	for _, command := range append(slices.Collect(maps.Keys(files)), "", "help", "completion bash", "limit", "pool") {
		_, help := run(append(strings.Fields(command), "--help"))
		require.LessOrEqual(t, len(shownFlag.FindAllString(help, -1)), mostFlags, "%s: %s", command, help)
		_, all := run(append(strings.Fields(command), "--help-all"))
		for line := range strings.SplitSeq(help+all, "\n") {
			require.LessOrEqual(t, utf8.RuneCountInString(line), columns, "%s: %s", command, line)
		}
		require.Contains(t, help, "Usage:\n", command)
		require.Equal(t, strings.Contains(help, "There are more flags for "), help != all, command)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "good.yaml")
	require.NoError(t, os.WriteFile(path, []byte(good), 0o600))
	for command, lists := range files {
		code, said := run(append(strings.Fields(command), "--nonsense"))
		require.Equal(t, usage, code, "%s: %s", command, said)
		for _, args := range lists {
			for _, bad := range []string{filepath.Join(dir, "none.yaml"), t.TempDir()} {
				line := strings.Fields(command + " " + args)
				for i, word := range line {
					switch word {
					case "FILE":
						line[i] = bad
					case "GOOD":
						line[i] = path
					}
				}
				code, said := run(line)
				require.Equal(t, failed, code, "%v: %s", line, said)
				require.Contains(t, said, bad, "%v", line)
				require.NotContains(t, said, "for usage")
			}
		}
	}
}

// WrongInput runs each list of arguments in wrong, which must be wrong usage, and checks the error message. The message
// must have the text that wrong has for the list, and no text of an error of Go's libraries.
func WrongInput(t *testing.T, wrong map[string]string, run func(args []string) (int, string)) {
	t.Helper()
	for line, says := range wrong {
		code, said := run(strings.Fields(line))
		require.Equal(t, usage, code, "%s: %s", line, said)
		require.Contains(t, said, says, line)
		for _, own := range []string{"strconv", "time:", "invalid argument", "arg(s)"} {
			require.NotContains(t, said, own, line)
		}
	}
}

// leaves returns the commands that have no subcommands.
func leaves(cmd *cobra.Command, path string) []string {
	var list []string
	for _, sub := range cmd.Commands() {
		name := strings.TrimSpace(path + " " + sub.Name())
		switch {
		case sub.HasSubCommands():
			list = append(list, leaves(sub, name)...)
		default:
			list = append(list, name)
		}
	}
	return list
}
