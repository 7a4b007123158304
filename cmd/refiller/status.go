package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/admin"
)

const (
	statusTimeout = 5 * time.Second
	maxStatus     = 64 << 20 // bytes of an answer
)

func statusCommand(e env) *cobra.Command {
	var addr string
	var d display
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Tell who leads and how the buckets stand",
		Long:  "Ask a running replica's admin server who leads, under which epoch, and how each bucket stands.",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			if !cmd.Flags().Changed("addr") {
				if listen := e.environ["REFILLER_LISTEN"]; listen != "" {
					addr = listen
				}
			}
			if !strings.Contains(addr, "://") {
				addr = "http://" + addr
			}
			return d.show(cmd.Context(), e.stdout, func(ctx context.Context, w io.Writer) error { return showStatus(ctx, w, addr, d.output) })
		},
	}
	d.flags(cmd)
	cmd.Flags().StringVar(&addr, "addr", "http://127.0.0.1:9090", "URL of the replica's admin server ($REFILLER_LISTEN)")
	return cmd
}

// showStatus asks a replica and writes its answer.
func showStatus(ctx context.Context, w io.Writer, addr, output string) error {
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
	return writeStatus(w, s)
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

func writeStatus(w io.Writer, s admin.Status) error {
	role := "race: every replica refills, the index picks the winner"
	if s.Mode == "etcd" {
		switch {
		case s.Leader != nil:
			role = fmt.Sprintf("etcd: %s leads under epoch %d", s.Leader.Identity, s.Leader.Epoch)
		default:
			role = "etcd: nobody is known to lead: " + s.Election
		}
		if s.Racing {
			role += "; this replica races, since the pulse is silent"
		}
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "replica\t%s, up %s, config version %d\n", s.Identity, time.Since(s.Started).Round(time.Second), s.Config)
	fmt.Fprintf(t, "redis\t%s\n", s.Redis)
	fmt.Fprintf(t, "refills\t%s\n", role)
	switch {
	case s.Reload.Result == "refused":
		fmt.Fprintf(t, "config\trefused %s ago, version %d stays in force: %s\n",
			s.Now.Sub(s.Reload.At).Round(time.Second), s.Config, strings.Join(s.Reload.Problems, "; "))
	case len(s.Reload.Restart) > 0:
		fmt.Fprintf(t, "config\tin force after a restart: %s\n", strings.Join(s.Reload.Restart, ", "))
	}
	writeConflicts(t, s)
	alive := make([]string, len(s.Replicas))
	for i, r := range s.Replicas {
		alive[i] = r.Identity + " " + r.Role
		if r.Late {
			alive[i] = r.Identity + " is silent"
		}
	}
	if len(alive) > 0 {
		fmt.Fprintf(t, "alive\t%s\n", strings.Join(alive, ", "))
	}
	fmt.Fprintf(t, "here\t%d refills applied, %d lost to others, %d failed, %d tokens added\n\n",
		s.Calls["applied"], s.Calls["stale"]+s.Calls["early"], s.Errors, s.Added)
	fmt.Fprintln(t, "BUCKET\tTOKENS\tCAPACITY\tOUTSTANDING\tRATE\tINDEX\tLAST REFILL\tVERSION")
	for _, b := range s.Buckets {
		if b.Error != "" {
			fmt.Fprintf(t, "%s\t%s\n", b.Key, b.Error)
			continue
		}
		version := strconv.FormatInt(b.Policy, 10)
		switch {
		case b.Conflict:
			version += " CONFLICT"
		case b.Outdated:
			version += " (this file is older)"
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%d\t%.0f ms ago\t%s\n",
			b.Key, b.Tokens, b.Capacity, b.Outstanding, b.Rate+b.Schedule, b.Index, b.Age, version)
	}
	if more := s.Total - len(s.Buckets); more > 0 {
		fmt.Fprintf(t, "… and %d more\n", more)
	}
	if len(s.Templates) > 0 {
		fmt.Fprintln(t, "\nTEMPLATE\tSHARDS HERE\tNOT FULL HERE\tREFILLS\tFAILED")
	}
	for _, m := range s.Templates {
		fmt.Fprintf(t, "%q\t%d of 16\t%d\t%d\t%d\n", m.Prefix, m.Shards, m.Active, m.Refills, m.Errors)
	}
	if s.Pools != nil {
		writePools(t, s.Region, *s.Pools)
	}
	return t.Flush()
}

// writeConflicts tells where something else is in force than the replica's configuration says.
func writeConflicts(w io.Writer, s admin.Status) {
	if s.Conflicts.Total == 0 {
		return
	}
	fmt.Fprintf(w, "CONFLICT\tversion %d is in force with other policies than this replica's file has: raise the file's version\n", s.Config)
	for _, b := range s.Buckets {
		for _, d := range b.Differs {
			if b.Conflict {
				fmt.Fprintf(w, "\t%s: %s is %s in force, and %s in the file\n", b.Key, d.Field, orNone(d.InForce), orNone(d.File))
			}
		}
	}
	for _, what := range []string{s.Conflicts.Templates, s.Conflicts.Pools} {
		if what != "" {
			fmt.Fprintf(w, "\t%s\n", what)
		}
	}
}

// writePools tells how the replica's region stands in the pools.
func writePools(w io.Writer, region string, p admin.Pools) {
	coordinator := "nobody is known to coordinate: " + p.Election
	if p.Coordinator != nil {
		coordinator = fmt.Sprintf("%s coordinates under epoch %d", p.Coordinator.Identity, p.Coordinator.Epoch)
	}
	fmt.Fprintf(w, "\npools\tin %s; %s\n", region, coordinator)
	for what, problem := range map[string]string{"etcd": p.Cut, "redis": p.Away} {
		if problem != "" {
			fmt.Fprintf(w, "%s\tdoes not answer: %s\n", what, problem)
		}
	}
	fmt.Fprintln(w, "POOL\tTOKENS\tCAPACITY\tSHARE\tOF\tFLOOR\tDEMAND\tGRANT ENDS IN")
	for _, s := range p.Shares {
		ends := "on its floor"
		if s.Remaining > 0 {
			ends = seconds(s.Remaining)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", s.Pool, s.Tokens, s.Capacity, perSecond(s.Rate), perSecond(s.Limit), perSecond(s.Floor), perSecond(s.Demand), ends)
	}
}
