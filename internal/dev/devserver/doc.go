// Package devserver embeds the two servers that a refiller works with: a store that speaks Redis, in memory, and an
// etcd of one member. They are for trying things out and for tests, not for a deployment: the store is an incomplete
// model of Redis, and etcd doesn't wait for its disk.
//
// With the build tag production the program contains neither these servers nor their imports. Then [Embedded] is false,
// and starting a server returns [ErrLeftOut].
package devserver

import "errors"

// ErrLeftOut is returned for a server that this build doesn't contain.
var ErrLeftOut = errors.New("devserver: this build has no embedded servers (it was built with the tag production)")

// Server is an embedded server that runs.
type Server struct {
	addr string
	stop func()
}

// Addr returns the address on which the server listens, as host:port.
func (s *Server) Addr() string { return s.addr }

// Close stops the server and returns when it has stopped. It is called once.
func (s *Server) Close() { s.stop() }
