package main

import (
	"encoding/json"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestErrorsSayTheNextStep(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	require.NoError(t, server.Client().ConfigSet(t.Context(), "requirepass", "secret").Err())
	url := "redis://" + server.Addr()
	for _, args := range [][]string{{"grant", "a", "--redis", url}, {"limit", "list", "--redis", url},
		{"delete", "a", "--redis", url}} {
		code, _, stderr := runWith(t, nil, args...)
		require.Equal(t, 1, code, stderr)
		require.Contains(t, stderr, "--redis-password-file", args)
	}

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	path := writeConfig(t, "redis: {url: \""+url+"\"}\nbuckets: [{key: a, capacity: 1, rate: 1/s}]\n")
	code, _, stderr := runWith(t, nil, "run", "--config", path, "--listen", taken.Addr().String())
	require.Equal(t, 1, code, stderr)
	require.Contains(t, stderr, "choose another with --listen")
}

func TestAnAuditLineHasTheFormOfTheLogAndTheOperator(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\nlog: {format: json, level: off}\n"+
		"buckets: [{key: a, capacity: 1, rate: 1/s}]\n")
	for operator, args := range map[string][]string{"ann": {"--operator", "ann"}, "bob": nil} {
		_, _, stderr := runWith(t, map[string]string{"REFILLER_OPERATOR": "bob"},
			append([]string{"grant", "a", "-c", path}, args...)...)
		var line map[string]any
		require.NoError(t, json.NewDecoder(strings.NewReader(stderr)).Decode(&line), stderr)
		require.Equal(t, operator, line["operator"])
	}
}
