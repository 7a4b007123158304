package luamutant_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/luamutant"
)

func TestAMutantDiffersInOnePlace(t *testing.T) {
	t.Parallel()
	_, err := luamutant.Of("s", "local = 1\n")
	require.ErrorContains(t, err, "luamutant: s line:1")

	const script = `--#include shared/policy
-- a comment
local n, busy = ARGV[1] + 0, true
local function room(p) return p.capacity - n end
if n > 0 and not busy then
  call('SET', KEYS[1], n)
end
return n == 9007199254740992 and room(p) or 'a' .. n
`
	mutants, err := luamutant.Of("s", script)
	require.NoError(t, err)
	type one struct {
		name string
		line int
	}
	var got []one
	texts := map[string]bool{}
	for _, m := range mutants {
		got = append(got, one{m.Name, m.Line})
		texts[m.Text] = true
		require.Contains(t, m.Text, "--#include shared/policy\n")
	}
	const (
		declared = "local n, busy = ARGV[1] + 0, true"
		branch   = "if n > 0 and not busy then"
		last     = "return n == 9007199254740992 and room(p) or 'a' .. n"
	)
	require.Equal(t, []one{
		{"s: delete the values of " + declared, 3},
		{"s: 1 -> 2 in " + declared, 3},
		{"s: 0 -> 1 in " + declared, 3},
		{"s: true -> false in " + declared, 3},
		{"s room: delete return p.capacity - n", 4},
		{"s: n > 0 -> n <= 0 in " + branch, 5},
		{"s: n > 0 -> n >= 0 in " + branch, 5},
		{"s: 0 -> 1 in " + branch, 5},
		{"s: not busy -> busy in " + branch, 5},
		{"s: delete call('SET', KEYS[1], n)", 6},
		{"s: 1 -> 2 in call('SET', KEYS[1], n)", 6},
		{"s: delete " + last, 8},
		{"s: n == 9007199254740992 -> n ~= 9007199254740992 in " + last, 8},
		{"s: 9007199254740992 -> 9007199254740991 in " + last, 8},
	}, got)
	require.Len(t, texts, len(mutants), "each mutant is another script")
	require.Equal(t, `--#include shared/policy
local n, busy = ARGV[1] + 0, true
local function room(p)
  return p.capacity - n
end
if n > 0 and not busy then
  call('SET', KEYS[1], n)
end
`, mutants[11].Text)
}

// A script doesn't change its meaning when it is printed: if the printed script is parsed and printed again, the text
// is the same.
func TestThePrintedScriptsAreThoseThatWereParsed(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"*.lua", "shared/*.lua"} {
		files, err := filepath.Glob(filepath.Join("../../../lua", pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files)
		for _, file := range files {
			source, err := os.ReadFile(file)
			require.NoError(t, err)
			once, err := luamutant.Printed(file, string(source))
			require.NoError(t, err)
			twice, err := luamutant.Printed(file, once)
			require.NoError(t, err)
			require.Equal(t, once, twice)
		}
	}
	for _, precise := range []string{
		"return (a or b) and not (c and d) or #(a .. b) - (1 - (2 - 3)) * (4 + 5) / -6 ^ 7\n",
		"local a, b = ..., (f(...))\nreturn ('%d'):rep(2), ({1, x = 2, [3] = 4}).x, -(-1)\n",
		"for i = 1, 2, 3 do\n  while true do\n    break\n  end\nend\ndo\n  a.b['c d'] = 'it\\'s \\\\ \\n'\nend\n",
	} {
		once, err := luamutant.Printed("x", precise)
		require.NoError(t, err)
		require.Equal(t, precise, once)
	}
}
