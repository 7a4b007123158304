// Package httplimit puts a limiter in front of net/http handlers.
//
// A [Middleware] takes tokens for each request from a [limit.Limiter]: from refilled buckets (a [fetch.Client]), from
// any limiter of package limit, or from many at once. Its Wrap is a func(http.Handler) http.Handler, as routers built
// on net/http accept. The directory examples shows its use with chi, Echo and Gin. It is not for limiting the requests
// that a program makes: use a fetch.Client for that.
//
// # Keys
//
// A [KeyFunc] returns the key whose tokens a request takes: [ByIP], [ByHeader], [ByUser], [ByRoute], and their
// combinations with [Join] and [FirstOf]. A request without a key is refused with 400, so a client can't avoid a limit
// by leaving a header out.
//
// The client's address is the peer's, unless the peer is one of [Config.TrustedProxies]. Then X-Forwarded-For is read
// from its right end, where proxies append. The first address there that is not a trusted proxy's is the client's.
// Addresses that a client writes into the header itself are further left and are never read. An IPv6 client has a whole
// network of addresses, so [ByIP] counts a /64 as one client.
//
// # What happens to a request
//
// Addresses in [Config.Allow] pass at once. Then tokens are taken; the [Decision] is in the request's context
// ([FromContext]). A denied request gets 429 and Retry-After. With [Config.Shadow] it passes, and only OnLimit is
// called. An admitted request may be delayed ([Config.SlowDown]). If Redis is unavailable, a request gets 503. With
// [Config.FailOpen] it passes instead.
//
// # Headers
//
// RateLimit, RateLimit-Policy and the problem document of a denial follow draft-ietf-httpapi-ratelimit-headers-11. In
// RateLimit, t is the time until more tokens are available. X-RateLimit-Limit, -Remaining and -Reset (Unix seconds) are
// sent only with [Config.XHeaders]. Retry-After is never less than the t of a limit that denies. Jitter makes it
// longer, so that denied clients don't all come back at once.
package httplimit
