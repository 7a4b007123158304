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

// unauthenticated is the beginning of the error with which Redis refuses a command of more than ten words before a
// login.
const unauthenticated = "ERR Protocol error: unauthenticated"

// refusals are the beginnings of error replies that prove that the server ran no part of a command or script.
var refusals = []string{"NOAUTH", unauthenticated, "WRONGPASS", "NOPERM", "LOADING", "MASTERDOWN", "CLUSTERDOWN"}

// writeRefusals are the beginnings of error replies of a server that accepts no writes at present. A script can get
// such a reply only for its first write, because a server does not stop a script that has written something.
var writeRefusals = []string{"READONLY", "MISCONF", "NOREPLICAS", "OOM"}

// alerts are the TLS alerts of a server that refuses a connection. Their meanings, in this order: handshake failure,
// bad certificate, unsupported certificate, certificate revoked, certificate expired, certificate unknown, unknown
// authority, access denied, certificate required.
var alerts = []tls.AlertError{40, 42, 43, 44, 45, 46, 48, 49, 116}

// PasswordAdvice is the advice for users about an error of WantsPassword.
const PasswordAdvice = "Write the password to a file, and give that file with --redis-password-file, " +
	"REFILLER_REDIS_PASSWORD_FILE or redis.password_file. If the user is not the default user, give it with " +
	"--redis-username."

// WantsPassword reports whether an error means that a server requires a password and got none or a wrong one.
func WantsPassword(err error) bool {
	return slices.ContainsFunc([]string{"NOAUTH", unauthenticated, "WRONGPASS"}, func(prefix string) bool {
		return redis.HasErrorPrefix(err, prefix)
	})
}

// Unsent reports whether an error proves that a command had no effect: there was no connection, or the server refused
// it. After any other error the command may have been executed.
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
		// Another refusal inside a script may have come after commands that were executed.
		return slices.ContainsFunc(writeRefusals, said) ||
			slices.ContainsFunc(refusals, said) && !strings.Contains(answer.Error(), "script")
	}
	return false
}
