package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// block is the first code block of a kind in a document.
func block(t *testing.T, doc, kind, after string) string {
	t.Helper()
	_, rest, found := strings.Cut(doc, after)
	require.True(t, found, after)
	_, rest, found = strings.Cut(rest, "```"+kind+"\n")
	require.True(t, found)
	text, _, found := strings.Cut(rest, "\n```")
	require.True(t, found)
	return text
}

func TestTheReadmesConfigurationAndCommandsAreGood(t *testing.T) {
	doc, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	config := block(t, string(doc), "yaml", "## Use it")
	var out bytes.Buffer
	status := run(t.Context(), []string{"check", "-"}, nil, strings.NewReader(config), &out, &out)
	require.Equal(t, exitOK, status, out.String())

	commands := 0
	for line := range strings.SplitSeq(block(t, string(doc), "sh", "## Use it"), "\n") {
		line, _, _ = strings.Cut(line, "#")
		args := strings.Fields(line)
		if args[0] != "refiller" {
			continue
		}
		commands++
		out.Reset()
		status := run(t.Context(), append(args[1:], "--help"), nil, nil, &out, &out)
		require.Equal(t, exitOK, status, "%s\n%s", line, out.String())
		require.NotContains(t, out.String(), "unknown")
		require.Contains(t, out.String(), "refiller "+args[1])
	}
	require.Equal(t, 6, commands)
}
