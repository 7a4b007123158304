package httplimit

import (
	"bufio"
	"io"
	"net"
	"net/http"

	"github.com/felixge/httpsnoop"
)

// status records the status of a response. code is 0 until there is one.
type status struct{ code int }

// watch returns a writer that records the status of the response. It has exactly the methods of w, because handlers
// check whether a writer has a method, for example to take over a connection for a WebSocket.
func (s *status) watch(w http.ResponseWriter) http.ResponseWriter {
	sent := func() {
		if s.code == 0 {
			s.code = http.StatusOK
		}
	}
	return httpsnoop.Wrap(w, httpsnoop.Hooks{
		// An informational status is not the status of the response.
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
		// A handler that takes over the connection answers with Switching Protocols.
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
