// Package httplimit puts a limiter in front of net/http handlers.
//
// A [Middleware] asks a [limit.Limiter] for each request: refilled buckets
// (a [fetch.Client]), any limiter of package limit, or many at once. Its Wrap is
// the func(http.Handler) http.Handler that routers built on net/http take; the
// directory examples has it in chi, Echo and Gin.
//
// # Keys
//
// A [KeyFunc] says whose tokens a request takes: [ByIP], [ByHeader], [ByUser],
// [ByRoute], and their combinations with [Join] and [FirstOf]. A request without
// a key is refused with 400, so leaving a header out is no way around a limit.
//
// The client's address is the peer's, unless the peer is one of [Config.TrustedProxies]. Then X-Forwarded-For is read
// from its right end, where proxies append, and the first address that is no trusted proxy's is the client's. Addresses
// that a client writes into the header itself are further left and are never read. IPv6 clients own whole networks, so
// [ByIP] counts a /64 as one.
//
// # What a request meets
//
// Addresses in [Config.Allow] pass at once. Then tokens are taken; the [Decision] is in the request's context
// ([FromContext]). A denied request gets 429 and Retry-After; with [Config.Shadow] it passes, and only OnLimit is
// called. An admitted one may be slowed down ([Config.SlowDown]). If Redis is unavailable, a request gets 503, or
// passes with [Config.FailOpen].
//
// # Headers
//
// RateLimit and RateLimit-Policy are those of
// draft-ietf-httpapi-ratelimit-headers-11, the problem document of a denial as
// well: t is the time until more tokens are there. X-RateLimit-Limit, -Remaining
// and -Reset (Unix seconds) are an option. Retry-After is never earlier than the
// end of RateLimit's t, and jitter makes it later only, so that denied clients
// don't all come back at once.
package httplimit
