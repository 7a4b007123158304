package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certs is a certificate authority of a test, with one certificate for servers on loopback and one for clients. All
// files are PEM.
type Certs struct {
	CAFile                string
	CertFile, KeyFile     string // for servers; valid for 127.0.0.1 and localhost
	ClientCert, ClientKey string
	authority             *x509.CertPool
	clientPair            tls.Certificate
}

// NewCerts makes a certificate authority and its certificates, in files that are removed when the test ends.
func NewCerts(t testing.TB) *Certs {
	t.Helper()
	dir := t.TempDir()
	fail := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatalf("testenv: make certificates: %v", err)
		}
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		fail(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	now := time.Now()
	template := func(serial int64, name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial),
			Subject:      pkix.Name{CommonName: name},
			NotBefore:    now.Add(-24 * time.Hour), // servers may run with another clock
			NotAfter:     now.Add(24 * time.Hour),
			KeyUsage:     x509.KeyUsageDigitalSignature,
			ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
			DNSNames:     []string{"localhost"},
			IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		}
	}

	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	fail(err)
	ca := template(1, "refiller test authority")
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign
	ca.ExtKeyUsage = nil
	ca.DNSNames = nil
	ca.IPAddresses = nil
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, caKey.Public(), caKey)
	fail(err)
	ca, err = x509.ParseCertificate(caDER)
	fail(err)

	issue := func(serial int64, name string) (certFile, keyFile string) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		fail(err)
		der, err := x509.CreateCertificate(rand.Reader, template(serial, name), ca, key.Public(), caKey)
		fail(err)
		keyDER, err := x509.MarshalECPrivateKey(key)
		fail(err)
		return write(name+".pem", "CERTIFICATE", der), write(name+"-key.pem", "EC PRIVATE KEY", keyDER)
	}
	c := &Certs{CAFile: write("ca.pem", "CERTIFICATE", caDER), authority: x509.NewCertPool()}
	c.authority.AddCert(ca)
	c.CertFile, c.KeyFile = issue(2, "server")
	c.ClientCert, c.ClientKey = issue(3, "client")
	c.clientPair, err = tls.LoadX509KeyPair(c.ClientCert, c.ClientKey)
	fail(err)
	return c
}

// ClientConfig returns a TLS configuration that trusts the authority and sends the client's certificate.
func (c *Certs) ClientConfig() *tls.Config {
	return &tls.Config{
		RootCAs:      c.authority,
		Certificates: []tls.Certificate{c.clientPair},
		MinVersion:   tls.VersionTLS12,
	}
}

// Install copies the files that a client needs to other paths, as a rotation of the client's secrets does.
func (c *Certs) Install(t testing.TB, ca, cert, key string) {
	t.Helper()
	for from, to := range map[string]string{c.CAFile: ca, c.ClientCert: cert, c.ClientKey: key} {
		content, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, content, 0o600)
		}
		if err != nil {
			t.Fatalf("testenv: install certificates: %v", err)
		}
	}
}
