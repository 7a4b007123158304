package sidecar

import (
	"crypto/tls"
	"net"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func httpsClient(t *testing.T, config *tls.Config) *http.Client {
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestMutualTLSAdmitsOnlyCertificatesOfTheAuthority(t *testing.T) {
	t.Parallel()
	certs, foreign := testenv.NewCerts(t), testenv.NewCerts(t)
	dir := t.TempDir()
	b := start(t, func(o *Options, _ *bench) {
		var err error
		o.TLS, err = credential.ServerTLS{Cert: certs.CertFile, Key: certs.KeyFile, ClientCA: certs.CAFile}.Config()
		require.NoError(t, err)
		o.HTTP = append(o.HTTP, "unix:"+dir+"/http")
		o.GRPC = append(o.GRPC, "unix:"+dir+"/grpc")
	})
	b.bucket("checkout", 10)
	url := "https://" + b.server.HTTPAddrs()[0].String() + "/v1/take"
	const body = `{"key":"checkout"}`
	request := &refillerv1.TakeRequest{Key: "checkout"}

	good := certs.ClientConfig()
	anonymous := certs.ClientConfig()
	anonymous.Certificates = nil
	stranger := certs.ClientConfig()
	stranger.Certificates = foreign.ClientConfig().Certificates

	r := send(t, httpsClient(t, good), http.MethodPost, url, body)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	_, err := refillerv1.NewBucketsClient(b.dial(grpc.WithTransportCredentials(credentials.NewTLS(good)))).Take(
		t.Context(), request)
	require.NoError(t, err)
	require.EqualValues(t, 8, b.tokens("checkout"))

	for name, config := range map[string]*tls.Config{"no certificate": anonymous, "another authority": stranger} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, jsonBody(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		res, err := httpsClient(t, config).Do(req)
		if err == nil {
			_ = res.Body.Close()
		}
		require.Error(t, err, name)
		_, err = refillerv1.NewBucketsClient(b.dial(grpc.WithTransportCredentials(credentials.NewTLS(config)))).Take(
			t.Context(), request)
		require.Error(t, err, name)
	}
	_, err = refillerv1.NewBucketsClient(b.dial()).Take(t.Context(), request)
	require.Error(t, err, "plain gRPC is refused")
	require.EqualValues(t, 8, b.tokens("checkout"))

	// Unix sockets stay plain, because file permissions protect them.
	r = send(t, unixClient(t, dir+"/http"), http.MethodPost, "http://sidecar/v1/take", body)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	conn := dialTo(t, b.server.GRPCAddrs()[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	_, err = refillerv1.NewBucketsClient(conn).Take(t.Context(), request)
	require.NoError(t, err)
	require.EqualValues(t, 6, b.tokens("checkout"))
}

func TestACertificateNamesItsClientWhereverItConnectsFrom(t *testing.T) {
	t.Parallel()
	certs := testenv.NewCerts(t)
	config, err := credential.ServerTLS{Cert: certs.CertFile, Key: certs.KeyFile, ClientCA: certs.CAFile}.Config()
	require.NoError(t, err)
	plain := clientAddr{&net.TCPAddr{}, "address 127.0.0.1"}
	state := func() *tls.ConnectionState {
		near, far := net.Pipe()
		server := tls.Server(near, config)
		clientConfig := certs.ClientConfig()
		clientConfig.ServerName = "localhost"
		client := tls.Client(far, clientConfig)
		defer near.Close()
		defer far.Close()
		done := make(chan error, 1)
		go func() { done <- client.HandshakeContext(t.Context()) }()
		require.NoError(t, server.HandshakeContext(t.Context()))
		require.NoError(t, <-done)
		s := server.ConnectionState()
		return &s
	}
	named := originOf(plain, state())
	require.Equal(t, named, originOf(clientAddr{&net.TCPAddr{}, "address 127.0.0.2"}, state()))
	require.NotEqual(t, named, originOf(plain, nil))
	require.Equal(t, "address 127.0.0.1", originOf(plain, &tls.ConnectionState{}),
		"an unverified certificate names no client")

	require.Equal(t, named, clientOf(named, call.Asks{Key: "checkout"}))
	require.Equal(t, "address 192.0.2.1", clientOf("address 192.0.2.1", call.Asks{Key: "checkout", Flow: "x"}))
	local := localOrigin + "address 127.0.0.1"
	a := call.Asks{Key: "a"}
	require.NotEqual(t, clientOf(local, a), clientOf(local, call.Asks{Key: "b"}),
		"a proxy on this host calls for many clients")
	require.NotEqual(t, clientOf(local, a), clientOf(local, call.Asks{Key: "a", Flow: "x"}),
		"a proxy on this host calls for many flows")
}
