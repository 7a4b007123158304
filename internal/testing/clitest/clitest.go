// Package clitest has tests that are common to the command lines of both programs. It is for tests only.
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

// shownFlag is a flag in a help.
var shownFlag = regexp.MustCompile(`(?m)^  (-|    -).*`)

// Each puts the same arguments before each of the others.
func Each(before string, others []string) []string {
	var list []string
	for _, o := range others {
		list = append(list, before+" "+o)
	}
	return list
}

// ExitCodes runs every command below root with an unknown flag, which is wrong usage, and with each of its lists of
// arguments. In these the word FILE means a file that is missing or can't be read, which is a failure, and GOOD means a
// file with the text good. A command without an entry fails the test. The help of each command fits eighty columns and
// has few flags, unless all are asked for.
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
		require.Equal(t, strings.Contains(help, "--help-all lists them"), help != all, command)
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

// WrongInput runs each list of arguments, which is wrong usage, and checks its message: it names the flag or argument
// and what is allowed, and has nothing of Go's own.
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

// leaves are the commands that do something themselves.
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
