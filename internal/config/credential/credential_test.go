package credential_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/credential"
)

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestPasswordIsReadFromItsFileEachTime(t *testing.T) {
	t.Parallel()
	path := file(t, " a b \n")
	p := credential.FromFile(path)
	got, err := p.Reveal()
	require.NoError(t, err)
	require.Equal(t, " a b ", got, "only one newline is removed")
	require.NoError(t, os.WriteFile(path, []byte("c\r\n"), 0o600))
	got, err = p.Reveal()
	require.NoError(t, err)
	require.Equal(t, "c", got)
	require.False(t, p.IsZero())
	require.True(t, credential.Password{}.IsZero())
}

func TestPasswordFileThatHoldsNoneIsAnError(t *testing.T) {
	t.Parallel()
	for content, says := range map[string]string{"": "it is empty", "\n": "it is empty",
		strings.Repeat("x", 70_000): "more than 65536 bytes"} {
		_, err := credential.FromFile(file(t, content)).Reveal()
		require.ErrorContains(t, err, says)
	}
	_, err := credential.FromFile(filepath.Join(t.TempDir(), "none")).Reveal()
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestPasswordPrintsMasked(t *testing.T) {
	t.Parallel()
	p := credential.Plain("hunter2")
	inside := struct{ P credential.Password }{p}
	asJSON, err := json.Marshal(inside)
	require.NoError(t, err)
	shown := fmt.Sprintf("%v %s %q %x %#v %+v %#v %s", p, p, p, p, p, inside, inside, asJSON)
	require.NotContains(t, shown, "hunter2")
	require.NotContains(t, shown, fmt.Sprintf("%x", "hunter2"))
	require.Contains(t, shown, credential.Mask)
	require.Equal(t, "file /run/p", credential.FromFile("/run/p").String())
}

func TestTLSNamesTheFileThatIsWrong(t *testing.T) {
	t.Parallel()
	bad := file(t, "no pem")
	for _, files := range []credential.TLS{{CA: bad}, {CA: bad + "x"}, {Cert: bad, Key: bad}, {Cert: bad}, {Key: bad}} {
		_, err := files.ClientConfig()
		require.ErrorContains(t, err, bad)
		require.False(t, files.IsZero())
	}
	c, err := credential.TLS{}.ClientConfig()
	require.NoError(t, err)
	require.Nil(t, c.RootCAs, "the system's certificates apply")
}
