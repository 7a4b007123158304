package httplimit

import (
	"bufio"
	"io"
	"net"
	"net/http"

	"github.com/felixge/httpsnoop"
)

// status is what a response's status was: 0 until there is one.
type status struct{ code int }

// watch makes a writer that does everything that w does, and nothing that it doesn't: handlers ask by type for what
// they need, to take a connection over for a WebSocket, say.
func (s *status) watch(w http.ResponseWriter) http.ResponseWriter {
	sent := func() {
		if s.code == 0 {
			s.code = http.StatusOK
		}
	}
	return httpsnoop.Wrap(w, httpsnoop.Hooks{
		// An informational status is not the response's.
		WriteHeader: func(next httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			return func(code int) {
				if s.code == 0 && (code >= 200 || code == http.StatusSwitchingProtocols) {
					s.code = code
				}
				next(code)
			}
		},
		Write: func(next httpsnoop.WriteFunc) httpsnoop.WriteFunc {
			return func(b []byte) (int, error) {
				sent()
				return next(b)
			}
		},
		ReadFrom: func(next httpsnoop.ReadFromFunc) httpsnoop.ReadFromFunc {
			return func(from io.Reader) (int64, error) {
				sent()
				return next(from)
			}
		},
		Flush: func(next httpsnoop.FlushFunc) httpsnoop.FlushFunc {
			return func() {
				sent()
				next()
			}
		},
		// What is said on a connection that was taken over is between its ends.
		Hijack: func(next httpsnoop.HijackFunc) httpsnoop.HijackFunc {
			return func() (net.Conn, *bufio.ReadWriter, error) {
				conn, rw, err := next()
				if err == nil && s.code == 0 {
					s.code = http.StatusSwitchingProtocols
				}
				return conn, rw, err
			}
		},
	})
}
