package credential

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
)

// ServerTLS names the PEM files of a TLS server. The zero ServerTLS is no TLS.
type ServerTLS struct {
	Cert     string // the server's certificate, with Key
	Key      string
	ClientCA string // authorities of the clients' certificates; if it is empty, clients need no certificate
}

// IsZero reports whether no file is named.
func (t ServerTLS) IsZero() bool { return t == ServerTLS{} }

// Config reads the files and returns a configuration for servers, TLS 1.2 or later. The certificate is read again for
// every handshake, so that it can be rotated; the authorities are read once.
func (t ServerTLS) Config() (*tls.Config, error) {
	if t.Cert == "" || t.Key == "" {
		return nil, errors.New("credential: tls of a server wants both a cert and a key")
	}
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("credential: tls cert %s and key %s: %w", t.Cert, t.Key, err)
		}
		return &pair, nil
	}
	if _, err := load(nil); err != nil {
		return nil, err
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: load}
	if t.ClientCA != "" {
		pem, err := os.ReadFile(t.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("credential: tls client ca: %w", err)
		}
		c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("credential: tls client ca %s: no PEM certificate in it", t.ClientCA)
		}
	}
	return c, nil
}
