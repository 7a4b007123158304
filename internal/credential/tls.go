package credential

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
)

// TLS names the PEM files of a TLS client. The zero TLS trusts the system's authorities and shows no certificate.
type TLS struct {
	CA   string // authorities to trust instead of the system's
	Cert string // the client's certificate, with Key
	Key  string
}

// IsZero reports whether no file is named.
func (t TLS) IsZero() bool { return t == TLS{} }

// ClientConfig reads the files and returns a configuration for clients, TLS 1.2 or later. The certificate is read again
// for every handshake, so that it can be rotated; the authorities are read once.
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
	if (t.Cert == "") != (t.Key == "") {
		return nil, fmt.Errorf("credential: tls cert %q and key %q go together", t.Cert, t.Key)
	}
	if t.Cert != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
			if err != nil {
				return nil, fmt.Errorf("credential: tls cert %s and key %s: %w", t.Cert, t.Key, err)
			}
			return &pair, nil
		}
		if _, err := load(); err != nil {
			return nil, err
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return c, nil
}
