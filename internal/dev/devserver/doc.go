// Package devserver embeds the two servers that a refiller works with: a store that speaks Redis, in memory, and an
// etcd of one member. They are for trying things out: the store is a model of Redis with gaps, and etcd doesn't wait
// for its disk.
//
// The build tag production leaves both servers, and all that they import, out of the program: then [Embedded] is false
// and starting one is [ErrLeftOut].
package devserver

import "errors"

// ErrLeftOut is returned for a server that this build doesn't contain.
var ErrLeftOut = errors.New("devserver: this build has no embedded servers (it was built with the tag production)")

// Server is an embedded server that runs.
type Server struct {
	addr string
	stop func()
}

// Addr is where the server listens, as host:port.
func (s *Server) Addr() string { return s.addr }

// Close stops the server and returns when it has stopped. It is called once.
func (s *Server) Close() { s.stop() }
