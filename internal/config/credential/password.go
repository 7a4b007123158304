package credential

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// Mask replaces a secret in output.
const Mask = "xxxxx"

// maxSecret is the most bytes a password file may hold.
const maxSecret = 64 << 10

// Password is a password or the path of the file that holds it, not both. The zero Password is no password. A Password
// prints without its secret.
type Password struct {
	value string
	file  string
}

// Plain returns a Password with the given secret.
func Plain(secret string) Password { return Password{value: secret} }

// FromFile returns a Password that is stored in a file. The file is read whenever the secret is needed, and one
// trailing newline is removed.
func FromFile(path string) Password { return Password{file: path} }

// IsZero reports whether there is no password.
func (p Password) IsZero() bool { return p == Password{} }

// Reveal returns the secret, reading its file if it has one. An empty or oversized file is an error.
func (p Password) Reveal() (string, error) {
	if p.file == "" {
		return p.value, nil
	}
	f, err := os.Open(p.file)
	if err != nil {
		return "", fmt.Errorf("credential: password file: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return "", fmt.Errorf("credential: password file: %w", err)
	}
	secret := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	switch {
	case secret == "":
		return "", fmt.Errorf("credential: password file %s: it is empty", p.file)
	case len(b) > maxSecret:
		return "", fmt.Errorf("credential: password file %s: it has more than %d bytes", p.file, maxSecret)
	}
	return secret, nil
}

// String masks the secret; a path is shown.
func (p Password) String() string {
	switch {
	case p.file != "":
		return "file " + p.file
	case p.value != "":
		return Mask
	default:
		return ""
	}
}

// GoString masks the secret under %#v too.
func (p Password) GoString() string { return "credential.Password(" + p.String() + ")" }

// MarshalText masks the secret in JSON, YAML and structured logs.
func (p Password) MarshalText() ([]byte, error) { return []byte(p.String()), nil }
