package accesslog

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzReader shows that every line that isn't blank is either a request with a
// key or counted as unparsed, whatever the log holds.
func FuzzReader(f *testing.F) {
	f.Add([]byte(line+"\r\n"+line), "agent")
	f.Add([]byte("\xef\xbb\xbf\n"+`{"ts":1.5,"request":{"uri":"/?"},"a":[null,{"b":"\u0041"}]}`), "a.1.b")
	f.Add([]byte("\x1f\x8b\x08"), "ip")
	f.Fuzz(func(t *testing.T, log []byte, name string) {
		r, err := NewReader(bytes.NewReader(log), name, "")
		if err != nil {
			require.ErrorIs(t, err, ErrField)
			return
		}
		var requests int64
		for {
			record, err := r.Next()
			if err != nil {
				if !errors.Is(err, io.EOF) {
					require.NotNil(t, packingOf(log), "only a packed log fails: %v", err)
					return
				}
				break
			}
			require.NotEmpty(t, record.Key)
			requests++
		}
		unparsed := r.Unparsed()
		require.Len(t, unparsed.Samples, int(min(unparsed.Lines, MaxSamples)))
		if packingOf(log) != nil {
			return
		}
		var lines int64
		for l := range bytes.SplitSeq(bytes.TrimPrefix(log, []byte("\xef\xbb\xbf")), []byte("\n")) {
			if len(l) > MaxLine || len(bytes.TrimSpace(l)) > 0 {
				lines++
			}
		}
		require.Equal(t, lines, requests+unparsed.Lines)
	})
}
