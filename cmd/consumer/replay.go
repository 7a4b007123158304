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
		Short: "Show what a policy would have done to an access log",
		Long: `Replay takes one token for each request of an access log, from the bucket of the request's key, and shows how
many requests would have been admitted and denied. The log's clock governs credit, whatever the speed. It needs no
Redis. A line that is out of order earns no credit: if many are, sort the log, and reverse one that begins with the
newest line by tac. A log has no retries after a denial, and
a live bucket's tokens come up to one interval later.

A key that isn't ip, user, method, status or path (without the query) is, in lines of text, one of uri, host, ident,
protocol, bytes, referer and agent, and in lines of JSON any field; lines without that field are unparsed. A request
without one of the others has the key "-".

LOG is a file, or - for standard input, plain or compressed by gzip, xz or zstd: Apache's or nginx's common or combined
format, the default format of Envoy or Istio, or lines of JSON as nginx, Caddy, Traefik, Envoy and Istio write them.
With X-Forwarded-For in front of a line, or in Envoy's and Istio's, ip is its first address.`,
		Example: `  consumer replay access.log --capacity 10 --rate 10/m
  consumer replay access.json.gz --key-by request.headers.X-Api-Key \
    --capacity 100 --rate 50/s -o json
  tail -F access.log |
    consumer replay - --key-by path --capacity 20 --rate 5/s --speed 1x`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range []string{"capacity", "rate"} {
				if !cmd.Flags().Changed(name) {
					return cli.Usage(fmt.Errorf("--%s is missing: want %s", name, cmd.Flag(name).Usage))
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
		"what has a bucket of its own: ip, user, method, path, status, or a field's name, with dots between nested ones")
	flags.StringVar(&f.time, "time-field", f.time,
		"field of the time in lines of JSON, with dots between nested ones (by default, that of the servers named above)")
	flags.Var(cli.NewValue("tokens", "", func(s string) (err error) {
		f.capacity, err = cli.ParseWhole(s, 1, policy.MaxTokens)
		return err
	}), "capacity", fmt.Sprintf("most tokens of each bucket, a whole number from 1 to %d", int64(policy.MaxTokens)))
	flags.Var(cli.NewValue("rate", "", func(s string) (err error) {
		f.rate, err = policy.ParseRate(s)
		return err
	}), "rate", "tokens per time, such as 500/s, 10/m or 1000/24h")
	flags.Var(cli.NewValue("speed", replay.Max.String(), func(s string) (err error) {
		f.speed, err = replay.ParseSpeed(s)
		return err
	}), "speed", "how fast the log's clock goes by: max, or a factor such as 1x or 100x")
	flags.Var(cli.NewValue("keys", strconv.Itoa(f.top), func(s string) error {
		n, err := cli.ParseWhole(s, 0, maxTop)
		f.top = int(n)
		return err
	}), "top", fmt.Sprintf("how many of the keys denied most to list, 0 to %d", maxTop))
	flags.VarP(cli.NewValue("format", f.output, func(s string) error {
		if s != "table" && s != "json" {
			return errors.New("want table or json")
		}
		f.output = s
		return nil
	}), "output", "o", "table or json")
	flags.BoolVar(&f.progress, "progress", false, "show progress on standard error (by default if it is a terminal)")
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
		return fmt.Errorf("%w, so its buckets earned no credit: reverse it, as by tac LOG | consumer replay -", stopped)
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
