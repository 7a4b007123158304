package httpapi

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// encoding/json decodes all halves of surrogate pairs as the same character. So different keys would become equal.
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
			require.ErrorContains(t, err, "half of a surrogate pair", body)
			continue
		}
		require.NoError(t, err, body)
		require.Equal(t, want, key, body)
	}
}
