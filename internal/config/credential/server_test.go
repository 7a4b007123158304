package credential_test

import (
	"crypto/tls"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestServerTLSNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	certs := testenv.NewCerts(t)
	empty := file(t, "no pem")
	for says, c := range map[string]credential.ServerTLS{
		"both a cert and a key":   {Cert: certs.CertFile},
		"key /nowhere":            {Cert: certs.CertFile, Key: "/nowhere"},
		"tls cert " + empty:       {Cert: empty, Key: certs.KeyFile},
		"tls client ca":           {Cert: certs.CertFile, Key: certs.KeyFile, ClientCA: "/nowhere"},
		"no PEM certificate":      {Cert: certs.CertFile, Key: certs.KeyFile, ClientCA: empty},
		"wants both a cert and a": {ClientCA: certs.CAFile},
	} {
		_, err := c.Config()
		require.ErrorContains(t, err, says)
	}
	require.True(t, credential.ServerTLS{}.IsZero())
	require.False(t, credential.ServerTLS{ClientCA: "x"}.IsZero())
}

func TestServerCertificateIsReadForEachHandshake(t *testing.T) {
	t.Parallel()
	first, second := testenv.NewCerts(t), testenv.NewCerts(t)
	config, err := credential.ServerTLS{Cert: first.CertFile, Key: first.KeyFile, ClientCA: first.CAFile}.Config()
	require.NoError(t, err)
	// served reports whether a client can connect if it trusts the authority of the first argument and sends the client
	// certificate of the second.
	served := func(trusted, shown *testenv.Certs) bool {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close()
		client := trusted.ClientConfig()
		client.Certificates = shown.ClientConfig().Certificates
		done := make(chan error, 1)
		go func() {
			c, err := tls.Dial("tcp", ln.Addr().String(), client)
			if err == nil {
				err = c.Close()
			}
			done <- err
		}()
		near, err := ln.Accept()
		require.NoError(t, err)
		defer near.Close()
		server := tls.Server(near, config)
		err = server.HandshakeContext(t.Context())
		_ = near.Close()
		if err := <-done; err != nil {
			t.Logf("the client says: %v", err)
		}
		return err == nil && len(server.ConnectionState().VerifiedChains) > 0
	}
	require.True(t, served(first, first))
	require.False(t, served(first, second), "a client of another authority is refused")
	require.False(t, served(second, first))
	for from, to := range map[string]string{second.CertFile: first.CertFile, second.KeyFile: first.KeyFile} {
		data, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(to, data, 0o600))
	}
	require.True(t, served(second, first), "the rotated certificate is used")
	require.False(t, served(first, first))
}
