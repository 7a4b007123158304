package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/operate/admin"
)

const (
	statusTimeout = 5 * time.Second
	maxStatus     = 64 << 20 // bytes of an answer
)

func statusCommand(e env) *cobra.Command {
	var addr string
	var d display
	flows := int64(flowsShown)
	cmd := &cobra.Command{
		Use:   "status [KEY [--flows[=N]]] [--watch[=TIME]]",
		Short: "Show which replica leads, and the state of the buckets",
		Long: `Show which replica leads and under which epoch, and the state of each bucket. With KEY, the command shows
only this bucket. It asks the admin server of one running replica, which is at --addr.

With --flows, the command lists the flows of bucket KEY that got the most tokens in the last minute. A replica only
knows the counts that it has read itself, so ask the replica that refills the bucket. If the replicas race for
refills, each of them has read a part of the counts.`,
		Example: "  refiller status\n  refiller status acme --flows --watch",
		Args:    cli.Positional(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			if d.isInterval(args) {
				return cli.Usage(fmt.Errorf("--watch %s: want --watch=%s", args[0], args[0]))
			}
			asked := statusOf{output: d.output, flows: cmd.Flags().Changed("flows"), query: url.Values{}}
			if len(args) > 0 {
				asked.key = args[0]
				asked.query.Set("key", asked.key)
			}
			if asked.flows && asked.key == "" {
				return cli.Usage(errors.New("--flows: want the KEY of a bucket, too"))
			}
			if asked.flows {
				asked.query.Set("flows", strconv.FormatInt(flows, 10))
			}
			from := "--addr"
			if listen := e.Environ["REFILLER_LISTEN"]; listen != "" && !cmd.Flags().Changed("addr") {
				from, addr = "REFILLER_LISTEN", listen
			}
			addr, err := adminURL(from, addr)
			if err != nil {
				return err
			}
			return d.show(cmd.Context(), e, func(ctx context.Context, w io.Writer, width int) error {
				return asked.show(ctx, w, width, addr)
			})
		},
	}
	d.flags(cmd)
	cmd.Flags().Var(cli.Whole("number", &flows, 1, admin.MaxFlows), "flows",
		fmt.Sprintf("number of flows of bucket KEY to list, from 1 to %d", admin.MaxFlows))
	cmd.Flags().Lookup("flows").NoOptDefVal = strconv.Itoa(flowsShown)
	cmd.Flags().StringVar(&addr, "addr", "http://127.0.0.1:9090",
		"URL or host:port of the replica's admin server ($REFILLER_LISTEN)")
	return cmd
}

// flowsShown is the number of listed flows of a bucket if the command line names no number.
const flowsShown = 20

// statusOf is a request for a replica's status.
type statusOf struct {
	key    string // of the bucket; empty for all buckets
	flows  bool   // list its flows
	query  url.Values
	output string
}

// show sends the request to the replica at addr. It writes the reply in lines of at most width columns.
func (a statusOf) show(ctx context.Context, w io.Writer, width int, addr string) error {
	body, err := get(ctx, strings.TrimSuffix(addr, "/")+"/status?"+a.query.Encode())
	if err != nil {
		return fmt.Errorf("status: %w: check that the admin server of a replica is at %s (--addr)", err, addr)
	}
	if a.output == "json" {
		_, err = w.Write(body)
		return err
	}
	var s admin.Status
	if err := json.Unmarshal(body, &s); err != nil {
		return fmt.Errorf("status: the reply from %s is not the status of a refiller: %w", addr, err)
	}
	switch {
	case a.key != "" && len(s.Buckets) == 0:
		return fmt.Errorf("status: the configuration of %s has no bucket %q", s.Identity, a.key)
	case !a.flows:
		return writeStatus(w, width, s)
	case s.Buckets[0].Flows == nil:
		return fmt.Errorf(
			"status: %s has read no flows of %q: the bucket has no flows, or another replica refills it", s.Identity, a.key)
	}
	return writeFlows(w, width, s.Buckets[0])
}

// adminURL returns the URL of an admin server. addr is a URL or host:port. from is the flag or variable
// that has this value. Errors name that flag or variable.
func adminURL(from, addr string) (string, error) {
	text, portless := addr, false
	if !strings.Contains(text, "://") {
		_, port, _ := strings.Cut(addr, ":")
		text, portless = "http://"+text, port == ""
	}
	u, err := url.Parse(text)
	if err != nil || portless || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return "", cli.Usage(fmt.Errorf("%s %s: want host:port, http://host:port or https://host:port", from,
			fields.Quote(addr)))
	}
	return text, nil
}

func get(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }() // it was read to its end or is not needed
	body, err := io.ReadAll(io.LimitReader(res.Body, maxStatus))
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, errors.New(res.Status)
	}
	return body, nil
}

// writeStatus writes the status of a replica in lines of at most width columns. A width of 0 means no limit.
func writeStatus(w io.Writer, width int, s admin.Status) error {
	errs := []error{terminal.WritePairs(w, width, statusPairs(s))}
	if len(s.Buckets) > 0 {
		errs = append(errs, line(w, ""), bucketTable(s).Write(w, width))
	}
	if more := s.Found - len(s.Buckets); more > 0 {
		errs = append(errs, line(w, fmt.Sprintf("… and %d more", more)))
	}
	if len(s.Templates) > 0 {
		errs = append(errs, line(w, ""), templateTable(s).Write(w, width))
	}
	if s.Pools != nil {
		errs = append(errs, line(w, ""), writePools(w, width, s.Region, *s.Pools))
	}
	return errors.Join(errs...)
}

func line(w io.Writer, text string) error {
	_, err := fmt.Fprintln(w, text)
	return err
}

// number returns a column of numbers.
func number(name string, spare int) terminal.Column {
	return terminal.Column{Name: name, Right: true, Spare: spare}
}

// statusPairs describes the replica and the other replicas.
func statusPairs(s admin.Status) []terminal.Pair {
	pairs := []terminal.Pair{
		{Name: "replica", Text: fmt.Sprintf("%s, up %s, config version %d",
			s.Identity, s.Now.Sub(s.Started).Round(time.Second), s.Config)},
		{Name: "redis", Text: terminal.Text(s.Redis)},
		{Name: "refills", Text: whoRefills(s)},
	}
	if s.Away != "" {
		pairs = append(pairs, terminal.Pair{Name: "PAUSED", Text: "refills are paused: " + s.Away})
	}
	if s.Reload.Result == "refused" {
		pairs = append(pairs, terminal.Pair{Name: "config", Text: fmt.Sprintf(
			"a change was refused %s ago, and version %d stays in force: %s",
			s.Now.Sub(s.Reload.At).Round(time.Second), s.Config, strings.Join(s.Reload.Problems, "; "))})
	}
	if len(s.Reload.Restart) > 0 {
		pairs = append(pairs, terminal.Pair{Name: "config",
			Text: "these changes take effect after a restart: " + strings.Join(s.Reload.Restart, ", ")})
	}
	pairs = append(append(append(pairs, conflictPairs(s)...), outdatedPairs(s)...), troublePairs(s)...)
	if s.Unlisted != "" {
		pairs = append(pairs, terminal.Pair{Name: "replicas", Text: "unknown: " + s.Unlisted})
	}
	alive := make([]string, len(s.Replicas))
	for i, r := range s.Replicas {
		alive[i] = r.Identity + " " + r.Role
		if r.Late {
			alive[i] = r.Identity + " is silent"
		}
	}
	if len(alive) > 0 {
		pairs = append(pairs, terminal.Pair{Name: "replicas", Text: strings.Join(alive, ", ")})
	}
	return append(pairs, terminal.Pair{Name: "work",
		Text: fmt.Sprintf("this replica: %d refills applied, %d made first by another replica, %d failed, %d tokens added",
			s.Calls["applied"], s.Calls["stale"]+s.Calls["early"], s.Errors, s.Added)})
}

func whoRefills(s admin.Status) string {
	if s.Mode != "etcd" {
		return "race: all replicas try each refill, and the first one succeeds"
	}
	role := "etcd: the leader is unknown: " + s.Election
	switch {
	case s.Leader != nil:
		role = fmt.Sprintf("etcd: %s leads under epoch %d", s.Leader.Identity, s.Leader.Epoch)
	case s.Leading:
		role = fmt.Sprintf("etcd: this replica leads under epoch %d, although etcd does not confirm it: %s", s.Epoch,
			s.Election)
	}
	if s.Racing {
		role += "; this replica also refills, because the leader's pulse is overdue"
	}
	return role
}

// bucketTable shows the state of the buckets.
func bucketTable(s admin.Status) *terminal.Table {
	text := func(name string) terminal.Column { return terminal.Column{Name: name, Text: true, Least: 28} }
	t := terminal.NewTable(text("BUCKET"), number("TOKENS", 0), number("CAPACITY", 0), number("OUTSTANDING", 3),
		text("RATE"), number("INDEX", 4), number("REFILLED", 2), terminal.Column{Name: "VERSION", Spare: 1})
	for _, b := range s.Buckets {
		if b.Error != "" {
			t.Span(b.Key, b.Error)
			continue
		}
		version := strconv.FormatInt(b.Policy, 10)
		switch {
		case b.Override:
			version = "override"
		case b.Conflict:
			version += " CONFLICT"
		case b.Outdated:
			version += " (this file is older)"
		}
		t.Row(b.Key, b.Tokens, b.Capacity, b.Outstanding, b.Rate+b.Schedule, b.Index, fmt.Sprintf("%.0f ms ago", b.Age),
			version)
	}
	return t
}

// writeFlows writes how a bucket is divided among its flows.
func writeFlows(w io.Writer, width int, b admin.Bucket) error {
	f := b.Flows
	pairs := []terminal.Pair{
		{Name: "bucket", Text: fmt.Sprintf("%s, %d of %d tokens, %s", terminal.Text(b.Key), b.Tokens, b.Capacity, b.Rate)},
		{Name: "flows", Text: fmt.Sprintf("%d seen, %d listed in the plan; a flow of weight 1 may have %s", f.Seen, f.Listed,
			admin.PerSecond(f.Level))},
		{Name: "counts", Text: fmt.Sprintf("from %.0f s of the last minute, as read by this replica", f.Covered)},
	}
	t := terminal.NewTable(terminal.Column{Name: "FLOW", Text: true, Least: 28}, number("GOT", 0), number("DEMAND", 0),
		number("DENIED", 0), terminal.Column{Name: "LISTED"})
	row := func(name string, one admin.Flow, listed string) {
		t.Row(name, admin.PerSecond(one.Got), admin.PerSecond(one.Demand), admin.PerSecond(one.Denied), listed)
	}
	for _, one := range f.List {
		listed := "no"
		if one.Listed {
			listed = "yes"
		}
		row(one.Label(), one, listed)
	}
	if f.Others != nil {
		row("all others", *f.Others, "")
	}
	return errors.Join(terminal.WritePairs(w, width, pairs), line(w, ""), t.Write(w, width))
}

// templateTable shows the work of the replica for the buckets of templates.
func templateTable(s admin.Status) *terminal.Table {
	t := terminal.NewTable(terminal.Column{Name: "TEMPLATE", Text: true}, terminal.Column{Name: "SHARDS HERE", Spare: 1},
		number("NOT FULL HERE", 0), number("REFILLS", 0), number("FAILED", 0),
		terminal.Column{Name: "MOST ACTIVE", Text: true, Spare: 2})
	for _, m := range s.Templates {
		most := make([]string, len(m.Most))
		for i, a := range m.Most {
			most[i] = fmt.Sprintf("%s %.3g/s", terminal.Text(a.Key), a.Rate)
		}
		t.Row(strconv.Quote(m.Prefix), fmt.Sprintf("%d of 16", m.Shards), m.Active, m.Refills, m.Errors,
			strings.Join(most, ", "))
	}
	return t
}

// conflictPairs lists buckets whose policy in force conflicts with the replica's configuration.
func conflictPairs(s admin.Status) []terminal.Pair {
	if s.Conflicts.Total == 0 {
		return nil
	}
	pairs := []terminal.Pair{{Name: "CONFLICT", Text: fmt.Sprintf(
		"version %d is in force with policies that differ from this replica's file: raise the version in the file",
		s.Config)}}
	for _, b := range s.Buckets {
		for _, d := range b.Differs {
			if b.Conflict {
				pairs = append(pairs, terminal.Pair{Text: fmt.Sprintf("%s: %s is %s in force, and %s in the file",
					terminal.Text(b.Key), d.Field, orNone(d.InForce), orNone(d.File))})
			}
		}
	}
	for _, what := range []string{s.Conflicts.Templates, s.Conflicts.Pools} {
		if what != "" {
			pairs = append(pairs, terminal.Pair{Text: what})
		}
	}
	return pairs
}

// outdatedPairs lists buckets that have a later version in force than the replica's configuration.
func outdatedPairs(s admin.Status) []terminal.Pair {
	if s.Outdated.Total == 0 {
		return nil
	}
	pairs := []terminal.Pair{{Name: "OLD FILE", Text: fmt.Sprintf(
		"this replica's file has version %d, and a later version is in force: to use the file, raise its version above that",
		s.Config)}}
	for _, key := range s.Outdated.Buckets {
		pairs = append(pairs, terminal.Pair{Text: key})
	}
	for _, what := range []string{s.Outdated.Templates, s.Outdated.Pools} {
		if what != "" {
			pairs = append(pairs, terminal.Pair{Text: what})
		}
	}
	return pairs
}

// troublePairs lists buckets that can't be refilled.
func troublePairs(s admin.Status) []terminal.Pair {
	var pairs []terminal.Pair
	for _, t := range s.Troubles {
		keys := make([]string, len(t.Buckets))
		for i, key := range t.Buckets {
			keys[i] = terminal.Text(key)
		}
		if t.Total > len(keys) {
			keys = append(keys, "…")
		}
		pairs = append(pairs, terminal.Pair{Name: "FAULT", Text: fmt.Sprintf("%d of %d buckets can't be refilled: %s (%s)",
			t.Total, s.Total, terminal.Text(t.Why), strings.Join(keys, ", "))})
	}
	return pairs
}

// writePools writes the state of the replica's region in the pools.
func writePools(w io.Writer, width int, region string, p admin.Pools) error {
	coordinator := "the coordinator is unknown: " + p.Election
	if p.Coordinator != nil {
		coordinator = fmt.Sprintf("%s coordinates, elected in epoch %d", p.Coordinator.Identity, p.Coordinator.Epoch)
	}
	pairs := []terminal.Pair{{Name: "pools", Text: fmt.Sprintf("region %s; %s", region, coordinator)}}
	for _, away := range []terminal.Pair{{Name: "etcd", Text: p.Cut}, {Name: "redis", Text: p.Away}} {
		if away.Text != "" {
			pairs = append(pairs, terminal.Pair{Name: away.Name, Text: "does not answer: " + away.Text})
		}
	}
	t := terminal.NewTable(terminal.Column{Name: "POOL", Text: true}, number("TOKENS", 0), number("CAPACITY", 3),
		number("SHARE", 0),
		number("TOTAL", 0), number("FLOOR", 1), number("DEMAND", 2), terminal.Column{Name: "GRANT"})
	for _, s := range p.Shares {
		t.Row(s.Pool, s.Tokens, s.Capacity, perSecond(s.Rate), perSecond(s.Limit), perSecond(s.Floor), perSecond(s.Demand),
			s.Grant())
	}
	return errors.Join(terminal.WritePairs(w, width, pairs), t.Write(w, width))
}
