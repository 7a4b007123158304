package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// Call is what a client calls.
type Call struct {
	// Method is the full method, such as /package.Service/Method.
	Method string
	// Message is the request of a unary call, or the message of a stream with PerMessage. Otherwise it is nil.
	Message any
}

// KeyFunc returns the key whose tokens a call takes. If it returns an error, the call is refused, and the text of the
// error is sent to the client.
type KeyFunc func(ctx context.Context, call Call) (string, error)

// ByMethod makes a key of each method.
func ByMethod() KeyFunc {
	return func(_ context.Context, call Call) (string, error) { return "method:" + call.Method, nil }
}

// ByMetadata makes a key of the value of a metadata field. The field must occur exactly once, and must not be empty.
func ByMetadata(name string) KeyFunc {
	name = strings.ToLower(name)
	return func(ctx context.Context, _ Call) (string, error) {
		values := metadata.ValueFromIncomingContext(ctx, name)
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("metadata %q: want one value that is not empty", name)
		}
		return "metadata:" + name + ":" + values[0], nil
	}
}

// ByPeer makes a key of the IP address from which the connection comes. IPv6 clients have whole networks, so a /64
// counts as one address. All connections over Unix sockets share one key.
func ByPeer() KeyFunc {
	return func(ctx context.Context, _ Call) (string, error) {
		p, ok := peer.FromContext(ctx)
		if !ok || p.Addr == nil {
			return "", errors.New("the peer is not known")
		}
		if p.Addr.Network() == "unix" {
			return "peer:unix", nil
		}
		host, _, err := net.SplitHostPort(p.Addr.String())
		if err != nil {
			host = p.Addr.String()
		}
		ip, err := netip.ParseAddr(host)
		if err != nil {
			return "", errors.New("the peer has no IP address")
		}
		ip = ip.Unmap().WithZone("")
		if ip.Is6() {
			return "peer:" + netip.PrefixFrom(ip, 64).Masked().String(), nil
		}
		return "peer:" + ip.String(), nil
	}
}

// ByUser makes a key of the result of user. This function reads the user from the context, where an authentication has
// put it. If the result is empty, the call is refused.
func ByUser(user func(context.Context) string) KeyFunc {
	return func(ctx context.Context, _ Call) (string, error) {
		if u := user(ctx); u != "" {
			return "user:" + u, nil
		}
		return "", errors.New("the user is not known")
	}
}

// Join makes one key of several, so that each combination has its own tokens.
func Join(keys ...KeyFunc) KeyFunc {
	return func(ctx context.Context, call Call) (string, error) {
		var b strings.Builder
		for i, key := range keys {
			k, err := key(ctx, call)
			if err != nil {
				return "", err
			}
			if i > 0 {
				b.WriteByte('|')
			}
			// The length marks the end of a part, whatever a client writes into it.
			b.WriteString(strconv.Itoa(len(k)) + ":" + k)
		}
		return b.String(), nil
	}
}
