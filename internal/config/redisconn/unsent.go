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

// unauthenticated is how Redis refuses a command of more than ten words before a login.
const unauthenticated = "ERR Protocol error: unauthenticated"

// refusals begin the answers of a server that has run nothing of a command or script.
var refusals = []string{"NOAUTH", unauthenticated, "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "CLUSTERDOWN"}

// writeRefusals begin the answers of a server that accepts no writes at present. A script gets one for its first write
// alone: once it has written something, servers let it end.
var writeRefusals = []string{"READONLY", "MISCONF", "NOREPLICAS", "OOM"}

// alerts are those of a server that refuses a TLS connection: handshake failure, certificates that are bad,
// unsupported, revoked, expired or unknown, unknown authority, access denied, certificate required.
var alerts = []tls.AlertError{40, 42, 43, 44, 45, 46, 48, 49, 116}

// PasswordAdvice says what to do about an error of WantsPassword.
const PasswordAdvice = "Put the password into a file, and name that with --redis-password-file, " +
	"REFILLER_REDIS_PASSWORD_FILE or redis.password_file; the user, unless it is the default one, with --redis-username."

// WantsPassword reports whether an error is that a server wants a password, and got none or a wrong one.
func WantsPassword(err error) bool {
	return slices.ContainsFunc([]string{"NOAUTH", unauthenticated, "WRONGPASS"}, func(prefix string) bool {
		return redis.HasErrorPrefix(err, prefix)
	})
}

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
		said := func(r string) bool { return strings.HasPrefix(answer.Error(), r) }
		// What else a script's own command was refused may have come after others.
		return slices.ContainsFunc(writeRefusals, said) ||
			slices.ContainsFunc(refusals, said) && !strings.Contains(answer.Error(), "script")
	}
	return false
}
