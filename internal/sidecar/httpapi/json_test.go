package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// encoding/json takes all halves of characters for one, so that different keys would be the same.
func TestHalvesOfCharactersAreRefused(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`"\ud83d\ude00"`:              "😀",
		`"\uD83D\uDE00 \u00e9\ufffd"`: "😀 é\ufffd",
		`"\\ud800"`:                   `\ud800`,
		`"\\\\udfff\n"`:               "\\\\udfff\n",
		`"\ud800"`:                    "",
		`"\udfff"`:                    "",
		`"\ud83d\ud83d\ude00"`:        "",
		`"\ud83d \ude00"`:             "",
		`"\ude00\ud83d"`:              "",
		`"\\\uDBFF\u00e9"`:            "",
	} {
		var key string
		err := decode([]byte(`{"key":`+body+`}`), fields{"key": &key})
		if want == "" {
			require.ErrorIs(t, err, call.ErrBadRequest, body)
			require.ErrorContains(t, err, "half of a character", body)
			continue
		}
		require.NoError(t, err, body)
		require.Equal(t, want, key, body)
	}
}
