package httplimit

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// ErrNoKey is returned by a KeyFunc for a request that has no key of its kind.
var ErrNoKey = errors.New("httplimit: request has no key")

// Request is a request and the address of its client.
type Request struct {
	*http.Request
	// IP is the client's address; the zero Addr if the peer has none, as on a
	// Unix socket.
	IP netip.Addr
}

// NewRequest makes a Request. It finds the address of the client behind trusted proxies.
func NewRequest(r *http.Request, trusted []netip.Prefix) Request {
	return Request{r, clientIP(r, trusted)}
}

// KeyFunc returns the key whose tokens a request takes. If it returns an error, the response is 400.
type KeyFunc func(r Request) (string, error)

// ByIP returns the client's address: an IPv4 address, or the /64 of an IPv6 address.
func ByIP() KeyFunc {
	return func(r Request) (string, error) {
		if !r.IP.IsValid() {
			return "", fmt.Errorf("%w: its peer has no address", ErrNoKey)
		}
		if r.IP.Is4() {
			return "ip:" + r.IP.String(), nil
		}
		prefix, err := r.IP.Prefix(64)
		if err != nil {
			return "", fmt.Errorf("%w: %w", ErrNoKey, err)
		}
		return "ip:" + prefix.String(), nil
	}
}

// ByHeader returns a header's name, in lower case, and its value, such as an API key. A client that can choose the
// value can choose whose tokens to take, so check the value first. A request that has the header twice is refused,
// because one value may come from a client and the other from a proxy.
func ByHeader(name string) KeyFunc {
	return func(r Request) (string, error) {
		values := r.Header.Values(name)
		switch {
		case len(values) > 1:
			return "", fmt.Errorf("httplimit: header %s is there %d times", name, len(values))
		case len(values) == 0 || values[0] == "":
			return "", fmt.Errorf("%w: header %s is missing", ErrNoKey, name)
		}
		return "header:" + strings.ToLower(name) + ":" + clean(values[0]), nil
	}
}

// ByUser returns the result of user. This function reads the user from the request's context, for example, where an
// authenticating handler has put it. If it returns "", the request has no user.
func ByUser(user func(*http.Request) string) KeyFunc {
	return func(r Request) (string, error) {
		u := user(r.Request)
		if u == "" {
			return "", fmt.Errorf("%w: it has no user", ErrNoKey)
		}
		return "user:" + clean(u), nil
	}
}

// ByRoute returns the pattern that http.ServeMux matched, with its method if it has one. All requests that no pattern
// matched share a key, and so do all requests in a middleware around the mux. So a client that invents paths or methods
// finds no fresh tokens.
func ByRoute() KeyFunc {
	return func(r Request) (string, error) { return "route:" + clean(r.Pattern), nil }
}

// Join returns all keys together, so that each combination has its own tokens, such as each user on each route.
func Join(keys ...KeyFunc) KeyFunc {
	return func(r Request) (string, error) {
		parts := make([]string, len(keys))
		for i, key := range keys {
			k, err := key(r)
			if err != nil {
				return "", err
			}
			parts[i] = k
		}
		return strings.Join(parts, "|"), nil
	}
}

// FirstOf returns the first key that the request has, such as its user, or its address if it has no user.
func FirstOf(keys ...KeyFunc) KeyFunc {
	return func(r Request) (string, error) {
		err := ErrNoKey
		for _, key := range keys {
			var k string
			k, err = key(r)
			if !errors.Is(err, ErrNoKey) {
				return k, err
			}
		}
		return "", err
	}
}

// clean makes any text a part of a key. The result has neither braces nor the bar that joins parts. Otherwise a client
// could choose a text that makes its key equal to the key of another client.
func clean(s string) string { return url.QueryEscape(s) }

// clientIP returns the client's address behind trusted proxies.
func clientIP(r *http.Request, trusted []netip.Prefix) netip.Addr {
	ip := peer(r.RemoteAddr)
	if !ip.IsValid() || !within(ip, trusted) {
		return ip
	}
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for i := len(hops) - 1; i >= 0; i-- {
		hop := peer(strings.TrimSpace(hops[i]))
		if !hop.IsValid() {
			return ip // the addresses to its left don't come from a proxy
		}
		ip = hop
		if !within(ip, trusted) {
			return ip
		}
	}
	return ip
}

// peer parses an address, with or without a port.
func peer(s string) netip.Addr {
	ip, err := netip.ParseAddr(strings.Trim(s, "[]"))
	if err != nil {
		ap, err := netip.ParseAddrPort(s)
		if err != nil {
			return netip.Addr{}
		}
		ip = ap.Addr()
	}
	return ip.Unmap().WithZone("")
}

func within(ip netip.Addr, prefixes []netip.Prefix) bool {
	for _, p := range prefixes {
		if p.Contains(ip) {
			return true
		}
	}
	return false
}
