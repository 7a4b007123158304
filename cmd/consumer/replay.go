package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/replay"
	"github.com/tokenrefill/refiller/internal/replay/accesslog"
	"github.com/tokenrefill/refiller/policy"
)

const maxTop = 10_000

// replayFlags has the parsed flags of replay, whose values are in range.
type replayFlags struct {
	keyBy    string
	time     string
	capacity int64
	rate     policy.Rate
	speed    replay.Speed
	top      int
	output   string
	progress bool
}

// newReplayCommand makes "consumer replay". It needs no server.
func newReplayCommand(stdin io.Reader, stdout, stderr io.Writer) *cobra.Command {
	f := replayFlags{keyBy: "ip", top: 10, output: "table"}
	cmd := &cobra.Command{
		Use:   "replay LOG|- --capacity C --rate R",
		Short: "Show which requests of an access log a limit would have denied",
		Long: `Replay an access log against a limit, and show how many requests the limit would have admitted and denied.
No Redis is needed. Each key, by default each client address, has a bucket, which begins full. Each request takes one
token from the bucket of its key. The buckets earn tokens according to the times in the log, at any --speed.

LOG is a file, or - for standard input. It may be compressed with gzip, xz or zstd. Its lines are text or JSON. Text is
in the common or combined format of Apache and nginx, or in the default format of Envoy or Istio. JSON is in the form
that nginx, Caddy, Traefik, Envoy and Istio write.

--key-by names the field that is the key. All lines have the fields ip, user, method, path (without the query) and
status. Lines of text also have uri (with the query), host, ident, protocol, bytes, referer and agent. In lines of JSON,
the key may be any other field, too. If the field is empty, the key is "-". If the key is ip, lines without an address
are skipped. If the key is another field of JSON, lines without that field are skipped. The report counts skipped lines
as unparsed.

If a line of text begins with the addresses of X-Forwarded-For, or if a line in the format of Envoy or Istio has them,
ip is the first of these addresses.

The lines should be in order of time. A request that is earlier than a previous one adds no tokens to its bucket. If
many requests are out of order, sort the log. If the log begins with its newest line, reverse it with tac.

The numbers are estimates. Clients may retry a denied request, and a log doesn't show these retries. A real bucket is
refilled at intervals, so its tokens come up to one interval later than in the replay.`,
		Example: `  consumer replay access.log --capacity 10 --rate 10/m
  consumer replay access.json.gz --key-by request.headers.X-Api-Key \
    --capacity 100 --rate 50/s -o json
  tail -F access.log |
    consumer replay - --key-by path --capacity 20 --rate 5/s --speed 1x`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range []string{"capacity", "rate"} {
				if !cmd.Flags().Changed(name) {
					return cli.Usage(fmt.Errorf("--%s is missing (%s)", name, cmd.Flag(name).Usage))
				}
			}
			if !cmd.Flags().Changed("progress") {
				f.progress = terminal.Of(stderr, nil).Rewrites()
			}
			return runReplay(cmd.Context(), args[0], f, stdin, stdout, stderr)
		},
	}

	flags := cmd.Flags()
	flags.StringVar(&f.keyBy, "key-by", f.keyBy,
		"field that is the key: ip, user, method, path, status or another field; nested names are separated by dots")
	flags.StringVar(&f.time, "time-field", f.time,
		"field with the time in lines of JSON; nested names are separated by dots (default: the usual fields of the "+
			"servers above)")
	flags.Var(cli.NewValue("tokens", "", func(s string) (err error) {
		f.capacity, err = cli.ParseWhole(s, 1, policy.MaxTokens)
		return err
	}), "capacity", fmt.Sprintf("capacity of each bucket in tokens, from 1 to %d", int64(policy.MaxTokens)))
	flags.Var(cli.NewValue("rate", "", func(s string) (err error) {
		f.rate, err = policy.ParseRate(s)
		return err
	}), "rate", "refill rate of each bucket, such as 500/s, 10/m or 1000/24h")
	flags.Var(cli.NewValue("speed", replay.Max.String(), func(s string) (err error) {
		f.speed, err = replay.ParseSpeed(s)
		return err
	}), "speed", "speed of the replay: max, or a multiple of real time, such as 1x or 100x")
	flags.Var(cli.NewValue("keys", strconv.Itoa(f.top), func(s string) error {
		n, err := cli.ParseWhole(s, 0, maxTop)
		f.top = int(n)
		return err
	}), "top", fmt.Sprintf("number of keys to list, those with the most denied requests first, from 0 to %d", maxTop))
	flags.VarP(cli.NewValue("format", f.output, func(s string) error {
		if s != "table" && s != "json" {
			return errors.New("want table or json")
		}
		f.output = s
		return nil
	}), "output", "o", "output format: table or json")
	flags.BoolVar(&f.progress, "progress", false, "show progress on stderr (default: only if stderr is a terminal)")
	return cmd
}

func runReplay(ctx context.Context, name string, f replayFlags, stdin io.Reader, stdout, stderr io.Writer) error {
	// Check the policy before a file is opened or standard input is read.
	if _, err := replay.NewBuckets(f.capacity, f.rate); err != nil {
		return cli.Usage(fmt.Errorf("--capacity, --rate: %w", err))
	}
	log, size, err := openLog(name, stdin)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	defer log.Close()
	var source io.Reader = log
	if size < 0 {
		source = interruptible(ctx, log)
	}
	counted := &countingReader{r: source}
	reader, err := accesslog.NewReader(counted, f.keyBy, f.time)
	if err != nil {
		return cli.Usage(fmt.Errorf("--key-by, --time-field: %w", err))
	}
	cfg := replay.Config{Capacity: f.capacity, Rate: f.rate, Speed: f.speed, Top: f.top}
	progress := &replayProgress{w: stderr, read: counted, size: size}
	if f.progress {
		cfg.Progress = progress.show
	}
	report, stopped := replay.Run(ctx, reader, cfg)
	progress.clear()
	if err := writeReport(stdout, replayOutput{report, replayPolicy{f.capacity, f.rate.String(), f.keyBy}},
		f.output); err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	if stopped == nil && report.Total.Requests == 0 && report.Total.Unparsed > 0 {
		first := report.Unparsed[0]
		return fmt.Errorf("replay: %s: no request in %d lines; line %d: %s", name, report.Total.Unparsed, first.Line,
			first.Reason)
	}
	if errors.Is(stopped, replay.ErrBackwards) {
		return fmt.Errorf("%w, so its buckets earned no tokens: reverse the log with: tac LOG | consumer replay -", stopped)
	}
	return stopped
}

// openLog opens the log and returns its size. The size is -1 if the log is not a regular file.
func openLog(name string, stdin io.Reader) (log io.ReadCloser, size int64, err error) {
	if name == "-" {
		return io.NopCloser(stdin), -1, nil
	}
	file, err := os.Open(name) //nolint:gosec // the user names the file
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, 0, err
	}
	if info.IsDir() {
		file.Close()
		return nil, 0, fmt.Errorf("%s is a directory: want a log file", name)
	}
	if !info.Mode().IsRegular() {
		return file, -1, nil
	}
	return file, info.Size(), nil
}

// interruptible returns a reader of r that fails once ctx has ended. Reading from a terminal or a pipe can't be
// interrupted. So the goroutine may be blocked until r has more data, r is closed, or the process ends.
func interruptible(ctx context.Context, r io.Reader) io.Reader {
	out, in := io.Pipe()
	context.AfterFunc(ctx, func() { in.CloseWithError(ctx.Err()) })
	go func() {
		_, err := io.Copy(in, r)
		in.CloseWithError(err) // a nil error becomes EOF
	}()
	return out
}

// countingReader counts the bytes that are read.
type countingReader struct {
	r io.Reader
	n int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// replayOutput is the report with the policy that was replayed, in the form of the JSON output.
type replayOutput struct {
	replay.Report
	Policy replayPolicy `json:"policy"`
}

type replayPolicy struct {
	Capacity int64  `json:"capacity"`
	Rate     string `json:"rate"`
	KeyBy    string `json:"key_by"`
}

func writeReport(w io.Writer, out replayOutput, format string) error {
	if format == "table" {
		return writeTable(w, out)
	}
	return cli.WriteJSON(w, out, "  ")
}
