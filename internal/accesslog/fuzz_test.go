package accesslog

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzReader shows that every line that isn't blank is either a request with a
// key or counted as unparsed, whatever the log holds.
func FuzzReader(f *testing.F) {
	f.Add([]byte(line+"\r\n"+line), "agent")
	f.Add([]byte("\xef\xbb\xbf\n"+`{"ts":1.5,"request":{"uri":"/?"},"a":[null,{"b":"\u0041"}]}`), "a.1.b")
	f.Add([]byte("\x1f\x8b\x08"), "ip")
	f.Fuzz(func(t *testing.T, log []byte, name string) {
		r, err := NewReader(bytes.NewReader(log), name)
		if err != nil {
			require.ErrorIs(t, err, ErrField)
			return
		}
		var requests int64
		for {
			record, err := r.Next()
			if err != nil {
				if !errors.Is(err, io.EOF) {
					require.True(t, bytes.HasPrefix(log, []byte("\x1f\x8b\x08")), "only unpacking fails: %v", err)
					return
				}
				break
			}
			require.NotEmpty(t, record.Key)
			requests++
		}
		unparsed := r.Unparsed()
		require.Len(t, unparsed.Samples, int(min(unparsed.Lines, MaxSamples)))
		if bytes.HasPrefix(log, []byte("\x1f\x8b\x08")) {
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

// FuzzCLFTime shows that a time of the common log format is read as package
// time reads it.
func FuzzCLFTime(f *testing.F) {
	const layout = "02/Jan/2006:15:04:05 -0700"
	f.Add("29/Feb/2000:23:59:59 -2359", int64(0))
	f.Add("17/May/2015:10:05:03.999999999 +0000", int64(-62_000_000_000))
	f.Fuzz(func(t *testing.T, text string, unix int64) {
		if us, ok := parseCLF([]byte(text)); ok && text[18:20] != "60" {
			want, err := time.Parse(layout, text)
			require.NoError(t, err)
			require.Equal(t, want.UnixMicro(), us)
		}
		const first, last = -62167219200, 253402300799 // the years 0 to 9999
		unix = first + int64(uint64(unix)%(last-first+1))
		us, ok := parseCLF([]byte(time.Unix(unix, 0).UTC().Format(layout)))
		require.True(t, ok)
		require.Equal(t, unix*1e6, us)
	})
}
