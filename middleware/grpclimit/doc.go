// Package grpclimit puts a limiter in front of gRPC handlers.
//
// A [Middleware] takes tokens for each call from a [limit.Limiter]: from refilled buckets (a [fetch.Client]), from any
// limiter of package limit, or from many at once. Its Unary and Stream are server interceptors. It is not for limiting
// the calls that a program makes: use a fetch.Client for that.
//
// # Keys
//
// A [KeyFunc] returns the key whose tokens a call takes: [ByMethod], [ByMetadata], [ByPeer], [ByUser], and their
// combinations with [Join]. A call without a key is refused with INVALID_ARGUMENT, so a client can't avoid a limit by
// leaving metadata out. Clients choose their metadata. So limit by metadata only behind a proxy that sets it, or use
// the result of an authentication.
//
// # What happens to a call
//
// Tokens are taken before the handler runs; the [Decision] is in the handler's context ([FromContext]). A denied call
// gets RESOURCE_EXHAUSTED. If it is known when the tokens are due, the status has a google.rpc.RetryInfo, which
// retrying clients obey. With [Config.Shadow] a denied call passes, and only OnLimit is called. If the limiter can't
// answer, a call gets UNAVAILABLE. With [Config.FailOpen] it passes instead.
//
// A stream takes tokens once, when it begins. With [Config.PerMessage] it takes tokens for each message that the
// handler receives instead.
package grpclimit
