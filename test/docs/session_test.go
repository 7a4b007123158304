package docs

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

const (
	commandTimeout = 90 * time.Second       // one command, on a busy machine
	patience       = 30 * time.Second       // how long a command may fail because a server has just been started
	pause          = 100 * time.Millisecond // pause before a failed command is repeated
)

// session is the shell in which the commands of a document run.
type session struct {
	t     *testing.T
	dir   string
	ports map[string]string // a port of the document → its substitute
	stdin io.Writer
	codes *bufio.Reader // has a line with the exit code of each command
	pipe  *os.File      // the pipe from which codes reads
	ran   int           // number of commands
}

// prelude is run first. It makes the go command work in the session's directory, and kills all started programs when
// the shell exits.
const prelude = `
trap 'trap - TERM; kill 0' EXIT
go() {
	if [ "$1" = run ] && [ -f "$2" ]; then set -- run "$PWD/$2" "${@:3}"; fi
	(cd "$ROOT" && command go "$@")
}
`

var address = regexp.MustCompile(`((?:127\.0\.0\.1|localhost):|--port )(\d{4,5})\b`)

// newSession starts the shell of a document. Its PATH has the programs of the project, and redis-server and etcd. If
// the document doesn't start a Redis, newSession starts one.
func newSession(t *testing.T, document string) *session {
	t.Helper()
	s := &session{t: t, dir: t.TempDir(), ports: map[string]string{}}
	for _, port := range append(addresses(document), "6379", "9090", "8080", "8081") {
		if s.ports[port] == "" {
			s.ports[port] = strconv.Itoa(testenv.Ports(t, 1)[0])
		}
	}
	if !strings.Contains(document, "\nredis-server ") {
		_, port, _ := strings.Cut(testenv.Redis(t).Addr(), ":")
		s.ports["6379"] = port
	}
	bin := filepath.Join(s.dir, "bin")
	require.NoError(t, os.Mkdir(bin, 0o700))
	link := func(program string) {
		require.NoError(t, os.Symlink(program, filepath.Join(bin, filepath.Base(program))))
	}
	link(testenv.Build(t, "./cmd/refiller"))
	link(testenv.Build(t, "./cmd/consumer"))
	require.NoError(t, os.Symlink(testenv.RedisProgram(t), filepath.Join(bin, "redis-server")))
	if strings.Contains(document, "\netcd ") {
		require.NoError(t, os.Symlink(testenv.EtcdProgram(t), filepath.Join(bin, "etcd")))
	}
	sample, err := os.ReadFile("../../docs/access.log")
	require.NoError(t, err)
	s.write("access.log", string(sample))
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	s.start(append(s.defaults(document), "PATH="+bin+":"+os.Getenv("PATH"), "GOBIN="+bin, "ROOT="+root, "no_proxy=*"))
	return s
}

// addresses returns the ports in a document.
func addresses(document string) []string {
	var ports []string
	for _, m := range address.FindAllStringSubmatch(document, -1) {
		ports = append(ports, m[2])
	}
	return ports
}

// defaults returns environment variables that replace the programs' default addresses by those of the session. It
// leaves out a variable if the document uses two addresses of that kind.
func (s *session) defaults(document string) []string {
	env := []string{"REFILLER_SERVE_HTTP=127.0.0.1:" + s.ports["8080"], "REFILLER_SERVE_GRPC=127.0.0.1:" + s.ports["8081"]}
	if strings.Count(document, "listen: ") < 2 {
		env = append(env, "REFILLER_LISTEN=127.0.0.1:"+s.ports["9090"])
	}
	if !strings.Contains(document, ":6380") {
		env = append(env, "REFILLER_REDIS_URL=redis://127.0.0.1:"+s.ports["6379"]+"/0")
	}
	return env
}

// start starts the shell, which ends with the test.
func (s *session) start(env []string) {
	read, write, err := os.Pipe()
	require.NoError(s.t, err)
	shell := exec.Command("bash", "--noprofile", "--norc")
	shell.Dir = s.dir
	shell.Env = append(os.Environ(), env...)
	shell.ExtraFiles = []*os.File{write}
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.stdin, err = shell.StdinPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, shell.Start())
	require.NoError(s.t, write.Close())
	s.pipe, s.codes = read, bufio.NewReader(read)
	s.t.Cleanup(func() {
		_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL) // kills the shell and all programs that it has started
		_ = shell.Wait()
		_ = read.Close()
	})
	_, err = io.WriteString(s.stdin, prelude)
	require.NoError(s.t, err)
}

// run runs the commands of a block. If a command fails, run repeats it for a while, as a reader would until a server is
// up.
func (s *session) run(b block) {
	s.t.Helper()
	for _, c := range b.commands() {
		deadline := time.Now().Add(patience)
		for {
			output, code := s.command(c.Text)
			wrong := judge(b, c, output, code)
			if wrong == "" {
				break
			}
			again := code != 0 && code != 2 && code != 3 || strings.Contains(c.Text, " status")
			if !again || time.Now().After(deadline) {
				s.t.Fatalf("line %d: %s: %s\n%s%s", b.Line, strings.TrimSpace(c.Text), wrong, output, s.logs())
			}
			time.Sleep(pause)
		}
	}
}

// command runs one command and returns what it printed, and its exit code.
func (s *session) command(text string) (output string, code int) {
	s.t.Helper()
	s.ran++
	file := filepath.Join(s.dir, fmt.Sprintf("output-%d", s.ran))
	_, err := fmt.Fprintf(
		s.stdin,
		"{ %s\n} >'%s' 2>&1 </dev/null\necho $? >&3\n",
		strings.TrimRight(s.substitute(text), "\n"),
		file,
	)
	require.NoError(s.t, err)
	require.NoError(s.t, s.pipe.SetReadDeadline(time.Now().Add(commandTimeout)))
	line, err := s.codes.ReadString('\n')
	printed, _ := os.ReadFile(file) // empty if there is no such file
	require.NoError(s.t, err, "%s\n%s%s", text, printed, s.logs())
	code, err = strconv.Atoi(strings.TrimSpace(line))
	require.NoError(s.t, err)
	return string(printed), code
}

// logs returns the ends of the log files that commands have written.
func (s *session) logs() string {
	var all strings.Builder
	files, _ := filepath.Glob(filepath.Join(s.dir, "*.log"))
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && filepath.Base(file) != "access.log" {
			fmt.Fprintf(&all, "\n%s:\n%s", filepath.Base(file), text[max(0, len(text)-500):])
		}
	}
	return all.String()
}

var exitCode = regexp.MustCompile(`#.*here exit code (\d+)`)

// judge returns what is wrong with the output and the exit code of a command, or the empty string. In a block of
// language console, the output must be the one in the block, except for numbers. In other blocks, the exit code must be
// 0, or the one in the command's comment.
func judge(b block, c command, output string, code int) string {
	if b.Language == "console" {
		if !matches(plain(c.Output), plain(output)) {
			return "printed something else than\n" + c.Output + "but"
		}
		return ""
	}
	want := "0"
	if m := exitCode.FindStringSubmatch(c.Text); m != nil {
		want = m[1]
	}
	if strconv.Itoa(code) != want {
		return fmt.Sprintf("exit code %d, not %s", code, want)
	}
	return ""
}

// matches reports whether the lines are equal. An ellipsis in want matches any number of lines.
func matches(want, got []string) bool {
	for i, w := range want {
		if w == "…" {
			for skip := range len(got) - i + 1 {
				if matches(want[i+1:], got[i+skip:]) {
					return true
				}
			}
			return false
		}
		if i >= len(got) || w != got[i] {
			return false
		}
	}
	return len(want) == len(got)
}

var (
	number   = regexp.MustCompile(`\d[\d,.]*`)
	duration = regexp.MustCompile(`\b0 ?(µs|ms|s|m|h)(0(ms|s|m))*\b`)
	logLine  = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\S+ \[\w+\] `)
	process  = regexp.MustCompile(`\b(?:[\w.-]+/)+0\b`)
)

// plain returns the lines of a text without the programs' logs. It replaces what differs from run to run: numbers,
// units of times, names of processes, and spaces.
func plain(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if logLine.MatchString(line) {
			continue
		}
		line = number.ReplaceAllString(strings.Join(strings.Fields(line), " "), "0")
		line = process.ReplaceAllString(duration.ReplaceAllString(line, "TIME"), "PROCESS")
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// substitute replaces the ports of the document by the ports of this session. It doesn't change other ports.
func (s *session) substitute(text string) string {
	return address.ReplaceAllStringFunc(text, func(found string) string {
		m := address.FindStringSubmatch(found)
		return m[1] + cmp.Or(s.ports[m[2]], m[2])
	})
}

// write writes a file in the session's directory.
func (s *session) write(name, text string) {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(filepath.Join(s.dir, name), []byte(s.substitute(text)), 0o600))
}
