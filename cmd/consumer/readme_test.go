package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What the README says about this program runs as it is printed, from the root of the repository.
func TestTheReadmesReplayRuns(t *testing.T) {
	doc, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(doc), "\ngo run ./cmd/consumer replay ")
	require.True(t, found)
	line, _, _ := strings.Cut(rest, "\n")
	args := strings.Fields(line)
	args[0] = "../../" + args[0]
	out, _, err := replayed(t.Context(), nil, args...)
	require.NoError(t, err)
	require.Regexp(t, `denied +2 `, out, "a sample that shows something")
}
