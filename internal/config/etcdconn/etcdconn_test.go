package etcdconn_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestOpenRefusesOptionsThatAreWrong(t *testing.T) {
	t.Parallel()
	empty := filepath.Join(t.TempDir(), "empty.pem")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	good := []string{"127.0.0.1:2379"}
	for name, tc := range map[string]struct {
		options etcdconn.Options
		says    string
	}{
		"no endpoint": {etcdconn.Options{}, "endpoints: the list is empty"},
		"no port": {etcdconn.Options{Endpoints: []string{"localhost:1", "localhost"}},
			`endpoints[1]: "localhost": want`},
		"bad port": {etcdconn.Options{Endpoints: []string{"localhost:65536"}}, "endpoints[0]"},
		"no host":  {etcdconn.Options{Endpoints: []string{":2379"}}, "endpoints[0]"},
		"path":     {etcdconn.Options{Endpoints: []string{"http://localhost:2379/x"}}, "endpoints[0]"},
		"scheme":   {etcdconn.Options{Endpoints: []string{"redis://localhost:2379"}}, "endpoints[0]"},
		"twice":    {etcdconn.Options{Endpoints: []string{"a:1", "a:1"}}, "in the list twice"},
		"mixed": {etcdconn.Options{Endpoints: []string{"https://a:1", "http://b:1"}},
			"1 of 2 use TLS: want all or none"},
		"plain http with TLS files": {etcdconn.Options{Endpoints: []string{"http://a:1"}, TLS: credential.TLS{CA: empty}},
			"only with https endpoints"},
		"no password": {etcdconn.Options{Endpoints: good, Username: "u"}, `username: "u" has no password`},
		"no username": {etcdconn.Options{Endpoints: good, Password: credential.Plain("hunter2")},
			"username: it is required with password_file"},
		"cert without key": {etcdconn.Options{Endpoints: good, TLS: credential.TLS{Cert: "c"}}, "tls.key: it is required"},
		"no CA file":       {etcdconn.Options{Endpoints: good, TLS: credential.TLS{CA: empty + "x"}}, empty + "x"},
		"empty CA file":    {etcdconn.Options{Endpoints: good, TLS: credential.TLS{CA: empty}}, "no PEM certificate"},
		"empty key pair":   {etcdconn.Options{Endpoints: good, TLS: credential.TLS{Cert: empty, Key: empty}}, empty},
		"empty password":   {etcdconn.Options{Endpoints: good, Username: "u", Password: credential.FromFile(empty)}, empty},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := etcdconn.Open(tc.options)
			require.ErrorContains(t, err, tc.says)
			require.ErrorContains(t, err, "etcd: ")
			require.NotContains(t, fmt.Sprintf("%v %+v", err, tc.options), "hunter2")
		})
	}
}

func open(t *testing.T, o etcdconn.Options) *clientv3.Client {
	t.Helper()
	client, err := etcdconn.Open(o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestAPasswordIsReadForEachLogin(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1, testenv.WithPassword("first"))
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	client := open(t, etcdconn.Options{Endpoints: etcd.Endpoints(), Username: testenv.EtcdUser,
		Password: credential.FromFile(file)})
	_, err := client.Put(t.Context(), "k", "v")
	require.NoError(t, err)

	_, err = etcd.Client().UserChangePassword(t.Context(), testenv.EtcdUser, "second") // ends all logins
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	require.Eventually(t, func() bool {
		_, err = client.Put(t.Context(), "k", "w")
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
}

func TestCertificatesAreReadForEachConnection(t *testing.T) {
	t.Parallel()
	certs, strangers := testenv.NewCerts(t), testenv.NewCerts(t)
	etcd := testenv.Etcd(t, 1, testenv.WithTLS(certs))
	dir := t.TempDir()
	files := credential.TLS{CA: filepath.Join(dir, "ca"), Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	strangers.Install(t, files.CA, files.Cert, files.Key)
	client := open(t, etcdconn.Options{Endpoints: etcd.Endpoints(), TLS: files})
	short, cancel := contextFor(t, time.Second)
	defer cancel()
	_, err := client.Get(short, "k")
	require.Error(t, err, "neither side trusts the other's authority")
	certs.Install(t, files.CA, files.Cert, files.Key)
	require.Eventually(t, func() bool {
		short, cancel := contextFor(t, time.Second)
		defer cancel()
		_, err := client.Get(short, "k")
		return err == nil
	}, 30*time.Second, 10*time.Millisecond)
}

func contextFor(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(t.Context(), d)
}
