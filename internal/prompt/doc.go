// Package prompt lets callers wait on their contexts instead of on sockets.
//
// go-redis sets a context's deadline on a socket only with ContextTimeoutEnabled,
// and a cancellation never reaches one. A [Client] sends commands so that its
// callers return when their contexts end, whatever the options: if the socket
// would not notice in time, a goroutine makes the call and the caller waits for it
// and for its context.
//
// Such a goroutine lives until go-redis gives up on the socket, or until the Redis
// client is closed, which closes its sockets. There are at most [Most] of them, and
// further calls wait for one to end, or for their contexts.
package prompt
