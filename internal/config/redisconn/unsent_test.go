package redisconn_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// writesTwice is a script whose first write fills the memory.
const writesTwice = `
redis.call('SET', KEYS[1], string.rep('x', 8000000))
return redis.call('SET', KEYS[2], 'y')`

func TestAServerThatAcceptsNoWritesHasRunNothingOfAScript(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	keys := []string{"{k}1", "{k}2"}
	set := func(name, value string) { require.NoError(t, rdb.ConfigSet(t.Context(), name, value).Err()) }

	set("maxmemory", "6mb")
	require.NoError(t, rdb.Eval(t.Context(), writesTwice, keys).Err(), "the first write fills memory, the second passes")
	for answer, refuse := range map[string]func(){
		"OOM": func() {},
		"NOREPLICAS": func() {
			set("maxmemory", "0")
			set("min-replicas-to-write", "1")
		},
	} {
		refuse()
		for _, script := range []string{writesTwice, "return redis.pcall('SET', KEYS[1], 'z')"} {
			err := rdb.Eval(t.Context(), script, keys).Err()
			require.ErrorContains(t, err, answer)
			require.True(t, redisconn.Unsent(err), "%v", err)
		}
		set("maxmemory", "6mb")
		set("min-replicas-to-write", "0")
	}
	n, err := rdb.StrLen(t.Context(), keys[0]).Result()
	require.NoError(t, err)
	require.EqualValues(t, 8000000, n, "the script wrote nothing")
}

func TestAnErrorWithinAScriptLeavesOpenWhatItDid(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	err := rdb.Eval(t.Context(), "redis.call('SET', KEYS[1], 'x') return redis.call('INCR', KEYS[1])", []string{"k"}).Err()
	require.Error(t, err)
	require.False(t, redisconn.Unsent(err))
	require.False(t, redisconn.Unsent(errors.New("EOF")))
}
