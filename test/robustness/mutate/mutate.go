// Package mutate removes one mechanism from a system under test, to check that the verifier detects the removal. The
// mutants of package luamutant have another purpose: they check the tests of a single script.
//
// A script is changed between the programs and Redis. The programs call it by its hash. A proxy in front of Redis
// replaces the hash by the hash of a changed script, which Redis has loaded. So the programs under test need no switch
// for tests. Go code is changed by an overlay at build time.
package mutate

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1.
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// Script is a change of one of the scripts in package lua.
type Script struct {
	Name  string // such as "refill"
	Edits []Edit
}

// Edit replaces the text Old by New. Old must occur exactly once.
type Edit struct{ Old, New string }

// ErrStale is returned if the text that a change replaces doesn't occur exactly once in the source. Then the change
// must be adapted to the source.
var ErrStale = errors.New("mutate: the text to replace is not in the source exactly once")

func replace(source, before, after string) (string, error) {
	if strings.Count(source, before) != 1 {
		return "", fmt.Errorf("%w: %q", ErrStale, before)
	}
	return strings.Replace(source, before, after, 1), nil
}

// hashes returns the hash of the original script, the hash of the changed script, and the text of the changed script.
func (s Script) hashes(root string) (original, changed, text string, err error) {
	file, err := os.ReadFile(filepath.Join(root, "lua", s.Name+".lua"))
	if err != nil {
		return "", "", "", fmt.Errorf("mutate: %w", err)
	}
	source := lua.NewScript(s.Name, string(file)).Source()
	text = source
	for _, e := range s.Edits {
		text, err = replace(text, e.Old, e.New)
		if err != nil {
			return "", "", "", err
		}
	}
	hash := func(text string) string {
		sum := sha1.Sum([]byte(text)) //nolint:gosec // as above
		return hex.EncodeToString(sum[:])
	}
	return hash(source), hash(text), text, nil
}

// Front loads the changed script into the Redis at addr. It returns the address of a proxy in front of that Redis. The
// proxy replaces calls of the original script by calls of the changed one.
func (s Script) Front(t testing.TB, root, addr string) string {
	t.Helper()
	original, changed, text, err := s.hashes(root)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	ctx, cancel := context.WithCancel(context.Background())
	got, err := rdb.ScriptLoad(ctx, text).Result()
	if err != nil || got != changed {
		t.Fatalf("mutate: load: %v (hash %s, want %s)", err, got, changed)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		_ = ln.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { serve(ctx, client, addr, []byte(original), []byte(changed)) })
		}
	})
	return ln.Addr().String()
}

// serve forwards one connection, and replaces before by after in what the client sends.
func serve(ctx context.Context, client net.Conn, addr string, before, after []byte) {
	defer client.Close()
	server, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return
	}
	defer server.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = client.Close()
		_ = server.Close()
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(client, server) // the end of either connection ends both
		_ = client.Close()
	}()
	buf := make([]byte, 0, 64<<10)
	chunk := make([]byte, 32<<10)
	for {
		n, err := client.Read(chunk)
		buf = bytes.ReplaceAll(append(buf, chunk[:n]...), before, after)
		send := len(buf) - begun(buf, before)
		if _, werr := server.Write(buf[:send]); werr != nil || err != nil {
			break
		}
		buf = append(buf[:0], buf[send:]...)
	}
	_ = server.Close()
	<-done
}

// begun returns the number of bytes at the end of b that are a beginning of word.
func begun(b, word []byte) int {
	for n := min(len(b), len(word)-1); n > 0; n-- {
		if bytes.HasSuffix(b, word[:n]) {
			return n
		}
	}
	return 0
}

// Program builds a main package of the module with file changed as by [Overlay], and returns the path of the binary.
func Program(t testing.TB, root, pkg, file, before, after string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), filepath.Base(pkg))
	cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-w",
		"-overlay", Overlay(t, root, file, before, after), "-o", path, pkg)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("mutate: %v\n%s", err, out)
	}
	return path
}

// Overlay writes an overlay for go build and go test. In the overlay, the text before is replaced by after in file, a
// path below root. Overlay returns the path of the overlay.
func Overlay(t testing.TB, root, file, before, after string) string {
	t.Helper()
	path := filepath.Join(root, file)
	source, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed, err := replace(string(source), before, after)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	instead := filepath.Join(dir, filepath.Base(file))
	overlay := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]any{"Replace": map[string]string{path: instead}})
	if err == nil {
		err = errors.Join(os.WriteFile(instead, []byte(changed), 0o600), os.WriteFile(overlay, b, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	return overlay
}
