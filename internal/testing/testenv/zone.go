package testenv

import (
	"archive/zip"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Zones returns the time zones of Go's own data by name. They are the same on every machine. A program in an empty
// container uses them too. But time.LoadLocation prefers the machine's data, which may list changes for decades that
// Go's data describes by a rule.
func Zones(t testing.TB) map[string]*time.Location {
	t.Helper()
	return zones(t, func(string) bool { return true })
}

// Zone returns one of [Zones] by its name.
func Zone(t testing.TB, name string) *time.Location {
	t.Helper()
	zone := zones(t, func(n string) bool { return n == name })[name]
	require.NotNil(t, zone, name)
	return zone
}

// goRoot returns the directory of Go. It asks the go command, because a program that was compiled with -trimpath
// doesn't know the directory.
var goRoot = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	return strings.TrimSpace(string(out)), err
})

func zones(t testing.TB, wanted func(name string) bool) map[string]*time.Location {
	t.Helper()
	root, err := goRoot()
	require.NoError(t, err)
	data, err := zip.OpenReader(filepath.Join(root, "lib/time/zoneinfo.zip"))
	require.NoError(t, err)
	defer data.Close()
	found := map[string]*time.Location{}
	for _, f := range data.File {
		if strings.HasSuffix(f.Name, "/") || !wanted(f.Name) {
			continue
		}
		r, err := f.Open()
		require.NoError(t, err)
		text, err := io.ReadAll(r)
		require.NoError(t, err)
		found[f.Name], err = time.LoadLocationFromTZData(f.Name, text)
		require.NoError(t, err)
	}
	return found
}

// ZoneRule returns a zone that has only a rule in the form of the environment variable TZ, such as
// CET-1CEST,M3.5.0,M10.5.0/3.
func ZoneRule(t testing.TB, rule string) *time.Location {
	t.Helper()
	nothing := strings.Repeat("\x00", 31)
	block := "TZif2" + nothing + "\x00\x00\x00\x01\x00\x00\x00\x04" + nothing[:6] + "STD\x00"
	zone, err := time.LoadLocationFromTZData(rule, []byte(block+block+"\n"+rule+"\n"))
	require.NoError(t, err)
	return zone
}
