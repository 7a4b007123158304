package accesslog

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

const line = `192.0.2.1 - alice [17/May/2015:10:05:03 +0000] "GET /a/b?c=d HTTP/1.1" 200 512 "https://example.org/" "agent \"quoted\" 1.0"`

// instant is the time of line.
var instant = time.Date(2015, 5, 17, 10, 5, 3, 0, time.UTC).UnixMicro()

type read struct {
	time int64
	key  string
}

// readAll reads a log to its end.
func readAll(t *testing.T, log io.Reader, field string) ([]read, Unparsed) {
	t.Helper()
	r, err := NewReader(log, field, "")
	require.NoError(t, err)
	var all []read
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all, r.Unparsed()
		}
		require.NoError(t, err)
		all = append(all, read{record.Time, string(record.Key)})
	}
}

// readOne reads a log of one request.
func readOne(t *testing.T, log, field string) read {
	t.Helper()
	all, unparsed := readAll(t, strings.NewReader(log), field)
	require.Zero(t, unparsed)
	require.Len(t, all, 1)
	return all[0]
}

func packed(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes()
}

func TestEveryFieldOfACombinedLine(t *testing.T) {
	t.Parallel()
	for field, want := range map[string]string{
		"ip": "192.0.2.1", "ident": "-", "user": "alice", "method": "GET", "path": "/a/b", "uri": "/a/b?c=d",
		"protocol": "HTTP/1.1",
		"status":   "200", "bytes": "512", "referer": "https://example.org/", "agent": `agent \"quoted\" 1.0`, "host": "-",
	} {
		require.Equal(t, read{instant, want}, readOne(t, line, field), field)
	}
}

func TestFormsOfTextLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		line, field, want string
	}{
		"common": {`::1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip", "::1"},
		"IPv6": {`2001:db8::1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip",
			"2001:db8::1"},
		"host name": {`pc1.example.org - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip",
			"pc1.example.org"},
		"zone west of UTC": {`192.0.2.1 - - [17/May/2015:02:35:03 -0730] "GET / HTTP/1.0" 304 -`, "ip",
			"192.0.2.1"},
		"zone east of UTC": {`192.0.2.1 - - [18/May/2015:00:05:03 +1400] "GET / HTTP/1.0" 304 -`, "ip",
			"192.0.2.1"},
		"ISO time": {`192.0.2.1 - - [2015-05-17T12:05:03+02:00] "GET / HTTP/1.0" 304 -`, "ip", "192.0.2.1"},
		"no user":  {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "user", "-"},
		"user with a space": {`192.0.2.1 - Alice B [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "user",
			"Alice B"},
		"user with a bracket": {`192.0.2.1 - a[1] [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "user",
			"a[1]"},
		"virtual host in front": {`example.org:443 192.0.2.1 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`,
			"ip", "192.0.2.1"},
		"name of a virtual host": {`example.org:443 192.0.2.1 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`,
			"host", "example.org:443"},
		"user after a virtual host": {`example.org:443 192.0.2.1 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`,
			"user", "bob"},
		"path with spaces": {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET /a b HTTP/1.0" 404 1`, "path",
			"/a b"},
		"path with an escaped quote": {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET /\"x\" HTTP/1.0" 404 1`, "path",
			`/\"x\"`},
		"HTTP/0.9":          {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET /x" 404 1`, "path", "/x"},
		"no request at all": {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "-" 408 0`, "path", "-"},
		"a TLS handshake":   {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "\x16\x03\x01" 400 0`, "method", "-"},
		"no status":         {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" - -`, "status", "-"},
		"an agent cut short": {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 200 1 "-" "Mozi`, "agent",
			"Mozi"},
		"no agent": {`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 200 1`, "agent", "-"},
		"Windows line end": {"192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.0\" 200 1\r\n", "status",
			"200"},
		"forwarded by a proxy": {`203.0.113.7, 10.0.0.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip",
			"203.0.113.7"},
		"forwarded user": {`203.0.113.7, 10.0.0.1 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "user",
			"bob"},
		"forwarded without spaces": {`203.0.113.7,10.0.0.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip",
			"203.0.113.7"},
		"forwarded, and the proxy": {`203.0.113.7 10.0.0.9 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`,
			"ip", "203.0.113.7"},
		"forwarded twice, and the proxy": {
			`203.0.113.7, 10.0.0.1 10.0.0.9 - bob [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "user", "bob"},
		"forwarded in quotes": {`"203.0.113.7:80, 10.0.0.1" 10.0.0.9 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`,
			"ip", "203.0.113.7"},
		"not forwarded, in quotes": {`"-" 10.0.0.9 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip",
			"10.0.0.9"},
		"not forwarded":       {`- 10.0.0.9 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.0" 304 -`, "ip", "10.0.0.9"},
		"blank lines and BOM": {"\xef\xbb\xbf" + line + "\r\n\r\n\n", "ip", "192.0.2.1"},
	} {
		require.Equal(t, read{instant, c.want}, readOne(t, c.line, c.field), name)
	}
}

func TestFormsOfJSONLines(t *testing.T) {
	t.Parallel()
	caddy := `{"level":"info","ts":1431857103.25,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"10.0.0.1","remote_port":"41342",` +
		`"client_ip":"2001:db8::7","proto":"HTTP/2.0","method":"PUT","host":"example.org","uri":"/x?y=1","headers":{"X-Api-Key":["k1"],"Via":["a","b"]}},"user_id":"","status":201}`
	traefik := `{"ClientAddr":"192.0.2.9:5000","ClientHost":"192.0.2.9","ClientUsername":"-","DownstreamStatus":429,"RequestMethod":"GET","RequestPath":"/t?u","StartUTC":"2015-05-17T10:05:03.25Z","time":"2015-05-17T10:05:09Z"}`
	nginx := `{"time_local":"17/May/2015:12:05:03.25 +0200","remote_addr":"192.0.2.8","remote_user":"carol","request":"GET /n?m HTTP/1.1","status":"200","upstream":null}`
	at := instant + 250_000
	for _, c := range []struct{ line, field, want string }{
		{caddy, "ip", "2001:db8::7"}, {caddy, "method", "PUT"}, {caddy, "path", "/x"}, {caddy, "status", "201"},
		{caddy, "user", "-"},
		{caddy, "request.headers.X-Api-Key", "k1"}, {caddy, "request.headers.Via.1", "b"},
		{caddy, "request.host", "example.org"},
		{traefik, "ip", "192.0.2.9"}, {traefik, "method", "GET"}, {traefik, "path", "/t"}, {traefik, "status", "429"},
		{traefik, "user", "-"},
		{nginx, "ip", "192.0.2.8"}, {nginx, "method", "GET"}, {nginx, "path", "/n"}, {nginx, "status", "200"},
		{nginx, "user", "carol"},
		{`{"@timestamp":"2015-05-17T10:05:03.250Z","client.ip":"192.0.2.7"}`, "ip", "192.0.2.7"},
		{`{"timestamp":1431857103250,"client":{"ip":"192.0.2.7"}}`, "ip", "192.0.2.7"},
		{`{"time":"1431857103.25","remote_addr":"192.0.2.7:80"}`, "ip", "192.0.2.7"},
		{`{"time":"2015-05-17 10:05:03.25","request":{"remote_addr":"[2001:db8::1]:80"}}`, "ip", "2001:db8::1"},
		{`{"time":"2015-05-17T12:05:03.250+0200","tenant":{"plan.name":"gold\u0020plus"}}`, "tenant.plan.name", "gold plus"},
		{`{"time":"2015-05-17T10:05:03.25Z","n":12345678901234567890}`, "n", "12345678901234567890"},
		{` {"time": "2015-05-17T10:05:03.25Z" , "n" : true } `, "n", "true"},
	} {
		require.Equal(t, read{at, c.want}, readOne(t, c.line, c.field), "%s of %s", c.field, c.line)
	}
}

// These lines have the default formats of Envoy (from its documentation) and of Istio 1.20.
const (
	envoyLine = `[2015-05-17T10:05:03.000Z] "POST /api/v1/locations?x=1 HTTP/2" 204 - 154 7 226 100 ` +
		`"203.0.113.7, 10.0.35.28" "nsq2http" "cc21d9b0-cf5c-432b-8c7e-98aeb7988cd2" "locations" "tcp://10.0.2.1:80"`
	istioLine = `[2015-05-17T10:05:03.000Z] "GET /status/418 HTTP/1.1" 418 - via_upstream - "-" 0 135 3 1 "-" ` +
		`"curl/7.73.0-DEV" "84961386-6d84-929d-98bd-c5aee93b5c88" "httpbin:8000" "127.0.0.1:80" ` +
		`inbound|8000|| 127.0.0.1:41854 10.44.1.27:80 10.44.1.23:37652 outbound_.8000_._.httpbin.foo.svc default`
	istioJSON = `{"bytes_sent":135,"upstream_cluster":"outbound|8000||httpbin","downstream_remote_address":` +
		`"10.44.1.23:37652","authority":"httpbin:8000","path":"/status/418?x","protocol":"HTTP/1.1","method":"GET",` +
		`"response_code":418,"x_forwarded_for":"-","start_time":"2015-05-17T10:05:03.000Z","user_agent":"curl"}`
)

func TestLinesOfEnvoyAndIstio(t *testing.T) {
	t.Parallel()
	forwarded := strings.Replace(istioJSON, `"x_forwarded_for":"-"`, `"x_forwarded_for":"203.0.113.7,10.0.0.1"`, 1)
	for _, c := range []struct{ line, field, want string }{
		{envoyLine, "ip", "203.0.113.7"}, {envoyLine, "method", "POST"}, {envoyLine, "path", "/api/v1/locations"},
		{envoyLine, "status", "204"}, {envoyLine, "bytes", "7"}, {envoyLine, "agent", "nsq2http"},
		{envoyLine, "host", "locations"}, {envoyLine, "user", "-"}, {envoyLine, "referer", "-"},
		{istioLine, "ip", "10.44.1.23"}, {istioLine, "status", "418"}, {istioLine, "bytes", "135"},
		{istioLine, "agent", "curl/7.73.0-DEV"}, {istioLine, "host", "httpbin:8000"},
		{istioJSON, "ip", "10.44.1.23"}, {istioJSON, "method", "GET"}, {istioJSON, "path", "/status/418"},
		{istioJSON, "status", "418"}, {istioJSON, "authority", "httpbin:8000"}, {forwarded, "ip", "203.0.113.7"},
	} {
		require.Equal(t, read{instant, c.want}, readOne(t, c.line, c.field), "%s of %s", c.field, c.line)
	}
}

func TestTheFieldOfTheTimeCanBeNamed(t *testing.T) {
	t.Parallel()
	const log = `{"time":"2001-01-01T00:00:00Z","at":{"end":1431857103000},"ip":"192.0.2.1"}`
	for field, want := range map[string]int64{
		"": time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro(), "at.end": instant,
	} {
		r, err := NewReader(strings.NewReader(log), "ip", field)
		require.NoError(t, err)
		record, err := r.Next()
		require.NoError(t, err)
		require.Equal(t, want, record.Time)
	}
	r, err := NewReader(strings.NewReader(log), "ip", "ip")
	require.NoError(t, err)
	_, err = r.Next()
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, `no time that can be read in the field "ip"`, r.Unparsed().Samples[0].Reason)
	_, err = NewReader(strings.NewReader(log), "ip", "a..b")
	require.ErrorIs(t, err, ErrField)
}

func TestLinesThatCannotBeReadAreCountedWithTheReason(t *testing.T) {
	t.Parallel()
	for bad, reason := range map[string]string{
		"nonsense": "no time in brackets",
		`1.2.3.4 - - [31/Feb/2015:10:05:03 +0000] "GET / H" 200 1`:      "no time in brackets",
		`1.2.3.4 - - [17/Mai/2015:10:05:03 +0000] "GET / H" 200 1`:      "no time in brackets",
		`1.2.3.4 - - [17/May/2015:25:05:03 +0000] "GET / H" 200 1`:      "no time in brackets",
		`1.2.3.4 - - [17/May/2015:10:05:03] "GET / H" 200 1`:            "no time in brackets",
		`[17/May/2015:10:05:03 +0000] "GET / H" 200 1`:                  "no default format of Envoy",
		strings.Replace(envoyLine, "203.0.113.7, 10.0.35.28", "-", 1):   "no client address",
		`May 17 web nginx: 1.2.3.4 - - [17/May/2015:10:05:03 +0000] ""`: "more words before the time",
		`1.2.3.4 - - [17/May/2015:10:05:03 +0000] GET / 200 1`:          "no quoted request",
		`1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / \"`:            "not closed",
		`1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" ok`:  "no status",
		`{"time":"2015-05-17T10:05:03Z","ip":"1.2.3.4"`:                 "not a JSON object",
		`{"ip":"1.2.3.4","time":"noon"}`:                                "no time that can be read",
		`{"time":"2015-05-17T10:05:03Z","ip":null,"msg":"started"}`:     "no client address",
		strings.Repeat("x", MaxLine+1):                                  "longer than",
	} {
		all, unparsed := readAll(t, strings.NewReader(line+"\n"+bad+"\n"+line), "ip")
		require.Len(t, all, 2, "the lines around %.40q are read", bad)
		require.EqualValues(t, 1, unparsed.Lines, "%.40q", bad)
		require.EqualValues(t, 2, unparsed.Samples[0].Line)
		require.Contains(t, unparsed.Samples[0].Reason, reason)
	}

	_, unparsed := readAll(t, strings.NewReader(line), "tenant")
	require.Contains(t, unparsed.Samples[0].Reason, `no field "tenant"`)
	_, unparsed = readAll(t, strings.NewReader(`{"time":"2015-05-17T10:05:03Z"}`), "tenant")
	require.Contains(t, unparsed.Samples[0].Reason, `no field "tenant"`)
}

func TestOnlyTheFirstUnparsedLinesAreKept(t *testing.T) {
	t.Parallel()
	_, unparsed := readAll(t, strings.NewReader(strings.Repeat("nonsense\n", 1000)), "ip")
	require.EqualValues(t, 1000, unparsed.Lines)
	require.Len(t, unparsed.Samples, MaxSamples)
}

func TestALineOfAnyLengthIsPassedOverInBoundedMemory(t *testing.T) {
	// This test isn't parallel, because it would count what other tests allocate.
	long := io.MultiReader(strings.NewReader(line+"\n"), io.LimitReader(repeat('x'), 64<<20), strings.NewReader("\n"+line))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	all, unparsed := readAll(t, long, "ip")
	runtime.ReadMemStats(&after)
	require.Len(t, all, 2)
	require.EqualValues(t, 1, unparsed.Lines)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20))
}

// repeat is a stream of one byte that has no end.
type repeat byte

func (c repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(c)
	}
	return len(p), nil
}

// The files of xz and zstd were written by their own programs. Each has two members, as after one file was appended to
// another.
func TestLogsOfXzAndZstdAreUnpacked(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"two.log.xz", "two.log.zst"} {
		text, err := os.ReadFile("testdata/" + name)
		require.NoError(t, err)
		all, unparsed := readAll(t, iotest.OneByteReader(bytes.NewReader(text)), "ip")
		require.Equal(t, []read{{instant, "192.0.2.1"}, {instant, "192.0.2.1"}}, all, name)
		require.Zero(t, unparsed)

		r, err := NewReader(bytes.NewReader(text[:len(text)-9]), "ip", "")
		require.NoError(t, err)
		for err == nil {
			_, err = r.Next()
		}
		require.NotErrorIs(t, err, io.EOF, "%s is cut short", name)
	}
}

func TestGzippedLogsAreUnpacked(t *testing.T) {
	t.Parallel()
	// The log has two members, as after one file was appended to another. It is read a byte at a time.
	log := append(packed(t, line+"\n"), packed(t, line)...)
	all, unparsed := readAll(t, iotest.OneByteReader(bytes.NewReader(log)), "ip")
	require.Len(t, all, 2)
	require.Zero(t, unparsed)
}

func TestALogThatFailsIsAnErrorAfterWhatWasRead(t *testing.T) {
	t.Parallel()
	cut := packed(t, strings.Repeat(line+"\n", 1000))
	r, err := NewReader(bytes.NewReader(cut[:len(cut)-6]), "ip", "")
	require.NoError(t, err)
	n := 0
	for err = nil; err == nil; n++ {
		_, err = r.Next()
	}
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, 1001, n, "every line comes before the error")

	broken := errors.New("broken")
	r, err = NewReader(iotest.ErrReader(broken), "ip", "")
	require.NoError(t, err)
	_, err = r.Next()
	require.ErrorIs(t, err, broken)
}

func TestAFieldNameWithAnEmptyPartIsRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", ".", "a.", "a..b"} {
		_, err := NewReader(strings.NewReader(""), name, "")
		require.ErrorIs(t, err, ErrField, name)
	}
}

func TestAnEmptyLogHasNoRequests(t *testing.T) {
	t.Parallel()
	all, unparsed := readAll(t, strings.NewReader(""), "ip")
	require.Empty(t, all)
	require.Zero(t, unparsed)
}

func BenchmarkNext(b *testing.B) {
	for name, text := range map[string]string{
		"text": line,
		"json": `{"ts":1431857103.25,"request":{"client_ip":"192.0.2.1","method":"GET","uri":"/x","headers":{"Accept":["*/*"]}},"status":200}`,
	} {
		b.Run(name, func(b *testing.B) {
			log := []byte(strings.Repeat(text+"\n", 1000))
			b.SetBytes(int64(len(log) / 1000))
			b.ReportAllocs()
			r, err := NewReader(&cycle{text: log}, "ip", "")
			require.NoError(b, err)
			for b.Loop() {
				if _, err := r.Next(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// cycle returns a text repeatedly, without an end.
type cycle struct {
	text []byte
	at   int
}

func (c *cycle) Read(p []byte) (int, error) {
	n := copy(p, c.text[c.at:])
	c.at = (c.at + n) % len(c.text)
	return n, nil
}

func ExampleReader() {
	log := strings.NewReader(`192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 512
not a request
{"ts": 1431857104, "request": {"client_ip": "192.0.2.2"}}
`)
	r, err := NewReader(log, "ip", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	for {
		record, err := r.Next()
		if err != nil {
			break
		}
		fmt.Printf("%s %s\n", time.UnixMicro(record.Time).UTC().Format(time.TimeOnly), record.Key)
	}
	fmt.Println(r.Unparsed().Samples)
	// Output:
	// 10:05:03 192.0.2.1
	// 10:05:04 192.0.2.2
	// [{2 no time in brackets}]
}
