package main

import (
	"bytes"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/replay"
)

const (
	// progressInterval is the shortest time between two lines of progress.
	progressInterval = 200 * time.Millisecond
	// maxKeyWidth is the largest number of characters of a key that a table shows.
	maxKeyWidth = 60
)

// writeTable writes the report as tables.
func writeTable(w io.Writer, out replayOutput) error {
	var b bytes.Buffer
	total := out.Total
	fmt.Fprintf(&b, "capacity %d, rate %s, one bucket per %s\n", out.Policy.Capacity, out.Policy.Rate,
		printable(out.Policy.KeyBy))
	if total.Requests > 0 {
		span := time.Duration(out.Span.Seconds * float64(time.Second)).Round(time.Second)
		fmt.Fprintf(&b, "log from %s to %s UTC (%s)\n", clockText(out.Span.From), clockText(out.Span.To), span)
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, n int64, share string) { fmt.Fprintf(t, "%s\t%d\t%s\t\n", name, n, share) }
	row("requests", total.Requests, "")
	row("admitted", total.Admitted, percent(total.Admitted, total.Requests))
	row("denied", total.Denied, percent(total.Denied, total.Requests))
	row("keys", total.Keys, "")
	row("unparsed lines", total.Unparsed, "")
	if out.Span.OutOfOrder > 0 {
		row("out of order", out.Span.OutOfOrder, percent(out.Span.OutOfOrder, total.Requests))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if total.Requests > 0 {
		fmt.Fprintf(&b, "\npeak: %d requests in the second of %s UTC, %d of them denied\n", out.Peak.Requests,
			clockText(out.Peak.At), out.Peak.Denied)
	}
	if err := writeTop(&b, out.Top); err != nil {
		return err
	}
	if len(out.Unparsed) > 0 {
		b.WriteString("\nfirst unparsed lines:\n")
		for _, s := range out.Unparsed {
			fmt.Fprintf(&b, "  line %d: %s\n", s.Line, s.Reason)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeTop lists the keys whose requests were denied.
func writeTop(w io.Writer, top []replay.Key) error {
	if len(top) == 0 || top[0].Denied == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nkeys with the most denied requests:")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "DENIED\tREQUESTS\tSHARE DENIED\t  KEY")
	for _, k := range top {
		if k.Denied > 0 {
			fmt.Fprintf(t, "%d\t%d\t%s\t  %s\n", k.Denied, k.Requests, percent(k.Denied, k.Requests), printable(k.Key))
		}
	}
	return t.Flush()
}

func percent(n, of int64) string {
	if of == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(of))
}

func clockText(t time.Time) string { return t.UTC().Format(time.DateTime) }

// printable returns the start of a text from the log. The text is quoted if it has control characters.
func printable(s string) string { return terminal.Cut(terminal.Text(s), maxKeyWidth) }

// replayProgress shows the progress of the replay on one line of a terminal.
type replayProgress struct {
	w     io.Writer
	read  *countingReader
	size  int64 // of the log in bytes, -1 if unknown
	shown time.Time
}

// show rewrites the line, unless it was rewritten a short time ago. It is called before every request.
func (p *replayProgress) show(total replay.Total, clock int64) {
	if total.Requests == 0 || time.Since(p.shown) < progressInterval {
		return
	}
	p.shown = time.Now()
	part := ""
	if p.size > 0 {
		part = percent(p.read.n, p.size) + " of the log, "
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s%s UTC, %d requests, %s denied", part, clockText(time.UnixMicro(clock)), total.Requests,
		percent(total.Denied, total.Requests))
}

// clear erases the line.
func (p *replayProgress) clear() {
	if !p.shown.IsZero() {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
