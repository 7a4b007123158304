package redisconn

import (
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// refusals begin the answers of a server that has run nothing of a command or script.
var refusals = []string{"NOAUTH", "WRONGPASS", "NOPERM", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN"}

// alerts are those of a server that refuses a TLS connection: handshake failure, certificates that are bad, unsupported,
// revoked, expired or unknown, unknown authority, access denied, certificate required.
var alerts = []tls.AlertError{40, 42, 43, 44, 45, 46, 48, 49, 116}

// Unsent reports whether an error proves that a command had no effect: there was no connection, or the server refused
// it. Any other error leaves open whether the command was executed.
func Unsent(err error) bool {
	var dial *net.OpError
	var file *fs.PathError // of a password or certificate
	var certificate *tls.CertificateVerificationError
	var alert tls.AlertError
	var answer redis.Error
	switch {
	case errors.As(err, &dial) && dial.Op == "dial", errors.As(err, &file), errors.As(err, &certificate):
		return true
	case errors.As(err, &alert):
		return slices.Contains(alerts, alert)
	case errors.As(err, &answer):
		// What a script's own command was refused may have come after others.
		return slices.ContainsFunc(refusals, func(r string) bool { return strings.HasPrefix(answer.Error(), r) }) &&
			!strings.Contains(answer.Error(), "script")
	}
	return false
}
