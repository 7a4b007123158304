// Package grpclimit puts a limiter in front of gRPC handlers.
//
// A [Middleware] asks a [limit.Limiter] for each call: refilled buckets
// (a [fetch.Client]), any limiter of package limit, or many at once. Its Unary and
// Stream are server interceptors.
//
// # Keys
//
// A [KeyFunc] says whose tokens a call takes: [ByMethod], [ByMetadata],
// [ByPeer], [ByUser], and their combinations with [Join]. A call without a key is
// refused with INVALID_ARGUMENT, so leaving metadata out is no way around a
// limit. Metadata is the client's word: limit by it only behind a proxy that sets
// it, or by what authentication found out.
//
// # What a call meets
//
// Tokens are taken before the handler runs; the [Decision] is in the handler's context ([FromContext]). A denied call
// gets RESOURCE_EXHAUSTED with a google.rpc.RetryInfo, which retrying clients obey, unless it is unknown when the
// tokens are due. With [Config.Shadow] it passes, and only OnLimit is called. If the limiter can't answer, a call gets
// UNAVAILABLE, or passes with [Config.FailOpen].
//
// A stream takes tokens once, when it begins, or with [Config.PerMessage] for
// each message that the handler receives.
package grpclimit
