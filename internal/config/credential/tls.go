package credential

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// TLS names the PEM files of a TLS client. The zero TLS trusts the system's authorities and shows no certificate.
type TLS struct {
	// Authorities to trust instead of the system's.
	CA string `yaml:"ca" is:"pem file" env:"CA"`
	// The client's certificate, with its key.
	Cert string `yaml:"cert" is:"pem file" env:"CERT"`
	// Key of the certificate.
	Key string `yaml:"key" is:"pem file" env:"KEY"`
}

// IsZero reports whether no file is named.
func (t TLS) IsZero() bool { return t == TLS{} }

// Incomplete returns the name of the missing field if only one of Cert and Key is given. Otherwise it returns "".
func (t TLS) Incomplete() string {
	switch {
	case t.Cert == "" && t.Key != "":
		return "cert"
	case t.Cert != "" && t.Key == "":
		return "key"
	}
	return ""
}

// ClientConfig reads the files and returns a configuration for one connection of a client, TLS 1.2 or later. If it is
// called for each connection, all files can be rotated.
func (t TLS) ClientConfig() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("credential: tls ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("credential: tls ca %s: no PEM certificate in it", t.CA)
		}
	}
	if missing := t.Incomplete(); missing != "" {
		return nil, fmt.Errorf("credential: tls cert %q and key %q: set both or none", t.Cert, t.Key)
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("credential: tls cert %s and key %s: %w", t.Cert, t.Key, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
