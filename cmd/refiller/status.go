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
	cmd := &cobra.Command{
		Use:   "status [--watch[=TIME]]",
		Short: "Tell who leads and how the buckets stand",
		Long:  "Ask a running replica's admin server who leads, under which epoch, and how each bucket stands.",
		Args:  cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := d.validate(); err != nil {
				return err
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
				return showStatus(ctx, w, width, addr, d.output)
			})
		},
	}
	d.flags(cmd)
	cmd.Flags().StringVar(&addr, "addr", "http://127.0.0.1:9090", "URL of the replica's admin server ($REFILLER_LISTEN)")
	return cmd
}

// showStatus asks a replica and writes its answer within so many columns.
func showStatus(ctx context.Context, w io.Writer, width int, addr, output string) error {
	body, err := get(ctx, strings.TrimSuffix(addr, "/")+"/status")
	if err != nil {
		return fmt.Errorf("status: %w; is a replica's admin server at %s? (--addr)", err, addr)
	}
	if output == "json" {
		_, err = w.Write(body)
		return err
	}
	var s admin.Status
	if err := json.Unmarshal(body, &s); err != nil {
		return fmt.Errorf("status: %s does not answer as a refiller does: %w", addr, err)
	}
	return writeStatus(w, width, s)
}

// adminURL is the URL of an admin server that may be given as host:port. Errors name where it is from.
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
	defer func() { _ = res.Body.Close() }() // read to its end or given up
	body, err := io.ReadAll(io.LimitReader(res.Body, maxStatus))
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, errors.New(res.Status)
	}
	return body, nil
}

// writeStatus writes what a replica answered within so many columns, 0 for as many as it takes.
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

// number is a column of numbers.
func number(name string, spare int) terminal.Column {
	return terminal.Column{Name: name, Right: true, Spare: spare}
}

// statusPairs tells of the replica and those beside it.
func statusPairs(s admin.Status) []terminal.Pair {
	pairs := []terminal.Pair{
		{Name: "replica", Text: fmt.Sprintf("%s, up %s, config version %d",
			s.Identity, s.Now.Sub(s.Started).Round(time.Second), s.Config)},
		{Name: "redis", Text: terminal.Text(s.Redis)},
		{Name: "refills", Text: whoRefills(s)},
	}
	if s.Away != "" {
		pairs = append(pairs, terminal.Pair{Name: "PAUSED", Text: "refills pause: " + s.Away})
	}
	if s.Reload.Result == "refused" {
		pairs = append(pairs, terminal.Pair{Name: "config", Text: fmt.Sprintf("refused %s ago, version %d stays in force: %s",
			s.Now.Sub(s.Reload.At).Round(time.Second), s.Config, strings.Join(s.Reload.Problems, "; "))})
	}
	if len(s.Reload.Restart) > 0 {
		pairs = append(pairs, terminal.Pair{Name: "config",
			Text: "in force after a restart: " + strings.Join(s.Reload.Restart, ", ")})
	}
	pairs = append(append(append(pairs, conflictPairs(s)...), outdatedPairs(s)...), troublePairs(s)...)
	if s.Unlisted != "" {
		pairs = append(pairs, terminal.Pair{Name: "alive", Text: "not known: " + s.Unlisted})
	}
	alive := make([]string, len(s.Replicas))
	for i, r := range s.Replicas {
		alive[i] = r.Identity + " " + r.Role
		if r.Late {
			alive[i] = r.Identity + " is silent"
		}
	}
	if len(alive) > 0 {
		pairs = append(pairs, terminal.Pair{Name: "alive", Text: strings.Join(alive, ", ")})
	}
	return append(pairs, terminal.Pair{Name: "here",
		Text: fmt.Sprintf("%d refills applied, %d lost to others, %d failed, %d tokens added",
			s.Calls["applied"], s.Calls["stale"]+s.Calls["early"], s.Errors, s.Added)})
}

func whoRefills(s admin.Status) string {
	if s.Mode != "etcd" {
		return "race: every replica refills, the index picks the winner"
	}
	role := "etcd: nobody is known to lead: " + s.Election
	switch {
	case s.Leader != nil:
		role = fmt.Sprintf("etcd: %s leads under epoch %d", s.Leader.Identity, s.Leader.Epoch)
	case s.Leading:
		role = fmt.Sprintf("etcd: this replica leads under epoch %d, although etcd does not say so: %s", s.Epoch, s.Election)
	}
	if s.Racing {
		role += "; this replica races, since the pulse is silent"
	}
	return role
}

// bucketTable shows how the buckets stand.
func bucketTable(s admin.Status) *terminal.Table {
	text := func(name string) terminal.Column { return terminal.Column{Name: name, Text: true, Least: 28} }
	t := terminal.NewTable(text("BUCKET"), number("TOKENS", 0), number("CAPACITY", 0), number("OUTSTANDING", 3),
		text("RATE"), number("INDEX", 4), number("REFILLED", 2), terminal.Column{Name: "VERSION", Spare: 1})
	for _, b := range s.Buckets {
		if b.Error != "" {
			t.Note(b.Key, b.Error)
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

// templateTable shows what the replica does for the buckets of templates.
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

// conflictPairs tell where something else is in force than the replica's configuration says.
func conflictPairs(s admin.Status) []terminal.Pair {
	if s.Conflicts.Total == 0 {
		return nil
	}
	pairs := []terminal.Pair{{Name: "CONFLICT", Text: fmt.Sprintf(
		"version %d is in force with other policies than this replica's file has: raise the file's version", s.Config)}}
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

// outdatedPairs tell where a later version is in force than this replica's configuration has.
func outdatedPairs(s admin.Status) []terminal.Pair {
	if s.Outdated.Total == 0 {
		return nil
	}
	pairs := []terminal.Pair{{Name: "OLD FILE", Text: fmt.Sprintf(
		"a later version is in force than version %d, which this replica's file has: raise it to put the file in force",
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

// troublePairs tell which buckets can't be refilled.
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

// writePools tells how the replica's region stands in the pools.
func writePools(w io.Writer, width int, region string, p admin.Pools) error {
	coordinator := "nobody is known to coordinate: " + p.Election
	if p.Coordinator != nil {
		coordinator = fmt.Sprintf("%s coordinates, elected in epoch %d", p.Coordinator.Identity, p.Coordinator.Epoch)
	}
	pairs := []terminal.Pair{{Name: "pools", Text: fmt.Sprintf("in %s; %s", region, coordinator)}}
	for _, away := range []terminal.Pair{{Name: "etcd", Text: p.Cut}, {Name: "redis", Text: p.Away}} {
		if away.Text != "" {
			pairs = append(pairs, terminal.Pair{Name: away.Name, Text: "does not answer: " + away.Text})
		}
	}
	t := terminal.NewTable(terminal.Column{Name: "POOL", Text: true}, number("TOKENS", 0), number("CAPACITY", 3),
		number("SHARE", 0),
		number("OF", 0), number("FLOOR", 1), number("DEMAND", 2), terminal.Column{Name: "GRANT"})
	for _, s := range p.Shares {
		t.Row(s.Pool, s.Tokens, s.Capacity, perSecond(s.Rate), perSecond(s.Limit), perSecond(s.Floor), perSecond(s.Demand),
			s.Grant())
	}
	return errors.Join(terminal.WritePairs(w, width, pairs), t.Write(w, width))
}
