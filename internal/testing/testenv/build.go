package testenv

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
)

const (
	modulePath  = "github.com/tokenrefill/refiller"
	etcdModule  = "go.etcd.io/etcd/server/v3"
	cacheFolder = "refiller-testenv"
)

var (
	builtMu sync.Mutex
	built   = make(map[string]string) // package and flags → binary
)

// Build compiles a main package of this module, such as "./cmd/refiller", and returns the path of the binary. Flags
// are flags of go build, such as "-race" or "-tags=name". Build compiles once per test binary and set of arguments.
func Build(t testing.TB, pkg string, flags ...string) string {
	t.Helper()
	builtMu.Lock()
	defer builtMu.Unlock()
	key := strings.Join(append([]string{pkg}, flags...), " ")
	if path, ok := built[key]; ok {
		return path
	}
	root, err := moduleRoot()
	if err != nil {
		t.Fatalf("%v", err)
	}
	// The hash is different for each work tree and each set of flags. The last part is the program's name.
	sum := sha256.Sum256([]byte(root + " " + key))
	path := filepath.Join(cacheDir(), hex.EncodeToString(sum[:8]), filepath.Base(filepath.Join(root, pkg)))
	if err := goBuild(root, pkg, path, flags...); err != nil {
		t.Fatalf("%v", err)
	}
	built[key] = path
	return path
}

// EtcdProgram returns the path of an etcd server. It builds etcd the first time, unless ETCD_SERVER names a program.
func EtcdProgram(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("ETCD_SERVER"); path != "" {
		return findServer(t, path, "ETCD_SERVER names no program: unset it to build etcd from go.mod")
	}
	path, err := cachedEtcd()
	if err != nil {
		t.Fatalf("%v", err)
	}
	return path
}

// cachedEtcd builds the etcd version of go.mod, unless an earlier run has built it, and returns the path.
var cachedEtcd = sync.OnceValues(func() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	list := exec.Command("go", "list", "-m", "-f", "{{.Version}}", etcdModule)
	list.Dir = root
	version, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("testenv: find the etcd version in go.mod (is go in PATH?): %w", err)
	}
	name := strings.Join([]string{"etcd", strings.TrimSpace(string(version)), runtime.Version(), runtime.GOOS,
		runtime.GOARCH}, "-")
	path := filepath.Join(cacheDir(), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", fmt.Errorf("testenv: make cache directory: %w", err)
	}
	// Test packages that run at the same time wait here for the first of them to build etcd.
	lock, err := lockFile(path+".lock", syscall.LOCK_EX)
	if err != nil {
		return "", fmt.Errorf("testenv: lock etcd build: %w", err)
	}
	defer func() { _ = lock.Close() }()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, goBuild(root, etcdModule, path)
})

// goBuild compiles pkg into path. It renames the complete binary to path at the end, so that other processes may run or
// build it at the same time.
func goBuild(root, pkg, path string, flags ...string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("testenv: make cache directory: %w", err)
	}
	scratch, err := os.MkdirTemp(filepath.Dir(path), ".build-")
	if err != nil {
		return fmt.Errorf("testenv: make build directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	binary := filepath.Join(scratch, filepath.Base(path))
	// No test needs the state of the work tree or the debugger's tables in a binary.
	args := append([]string{"build", "-buildvcs=false", "-ldflags=-w"}, flags...)
	cmd := exec.Command("go", append(args, "-o", binary, pkg)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("testenv: go build %s: %w\n%s", pkg, err, out)
	}
	if err := os.Rename(binary, path); err != nil {
		return fmt.Errorf("testenv: install %s: %w", pkg, err)
	}
	return nil
}

// moduleRoot returns the directory of this module's go.mod, at or above the working directory.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("testenv: find module: %w", err)
	}
	for {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module "+modulePath+"\n") {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("testenv: no go.mod of %s at or above the working directory", modulePath)
		}
		dir = parent
	}
}

// cacheDir returns the directory of binaries that outlive a test run.
func cacheDir() string {
	base, err := os.UserCacheDir()
	if err != nil { // no home directory
		base = os.TempDir()
	}
	return filepath.Join(base, cacheFolder)
}

// findServer returns the path of a program, or fails the test with advice.
func findServer(t testing.TB, name, advice string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("testenv: %v; %s", err, advice)
	}
	path, err = filepath.Abs(path)
	if err != nil { // the path must be absolute, because each server runs in its own directory
		t.Fatalf("testenv: %v", err)
	}
	return path
}
