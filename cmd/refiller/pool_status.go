package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/pool"
)

// poolStatus reads and shows the pools, for the command pool status.
type poolStatus struct {
	pools
	display
	history bool
	addr    string // of a replica's admin server; empty for the configured address
}

func poolStatusCommand(e env) *cobra.Command {
	p := poolStatus{pools: pools{connection: connection{env: e}}}
	cmd := &cobra.Command{
		Use:   "status [--watch[=TIME]]",
		Short: "Show the share of each region in each pool, and the coordinator",
		Long: `Show the state of the pools, as etcd has it. These are the columns of the table. Rates are in tokens per
second:

    SHARE    rate that the region was granted, including its floor
    FLOOR    part of the share that the region may always use
    DEMAND   rate that the region could use
    CLAIMED  highest rate that the region may be using now
    TOKENS   tokens in the region's bucket, and the bucket's capacity
    STATE    alive, silent or, if the region has never reported, unknown
    GRANT    state of the grant, which is the part of the share above the floor

A region is alive if it reports while the command waits, for at most 2.5 s.

With --history, the command also shows which part of the pool's rate each region had in each minute of the last hour.
It reads this from the memory of one replica, through the admin server at --addr. A replica remembers up to 256
shares; each region of a pool has one share.`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.validate(); err != nil {
				return err
			}
			if p.addr != "" && !p.history {
				return cli.Usage(errors.New("--addr requires --history"))
			}
			if _, err := adminURL("--addr", p.addr); p.addr != "" && err != nil {
				return err
			}
			client, cfg, err := p.open()
			if err != nil {
				return err
			}
			defer func() { _ = client.Close() }() // only read, so the error doesn't matter
			return p.show(cmd.Context(), e, func(ctx context.Context, w io.Writer, width int) error {
				return p.write(ctx, w, width, client, cfg)
			})
		},
	}
	p.pools.flags(cmd)
	p.display.flags(cmd)
	cmd.Flags().BoolVar(&p.history, "history", false, "also show the shares of the last hour")
	cmd.Flags().StringVar(&p.addr, "addr", "",
		"URL or host:port of the admin server of a replica, for --history (default: listen in the configuration)")
	return cmd
}

// write reads the pools and writes their state in lines of at most width columns.
func (p *poolStatus) write(ctx context.Context, w io.Writer, width int, client *clientv3.Client,
	cfg config.Config) error {
	ctx, cancel := context.WithTimeout(ctx, operateTimeout)
	defer cancel()
	s, err := pool.ReadLiveStatus(ctx, client, cfg.PoolsPrefix())
	if err != nil {
		return withEtcdAddresses(err, cfg)
	}
	leader, err := leaderOf(ctx, client, cfg.PoolsPrefix())
	if err != nil && !errors.Is(err, election.ErrNoLeader) {
		return withEtcdAddresses(err, cfg)
	}
	answer := poolAnswer{Coordinator: leader.Identity, Epoch: leader.Epoch, Status: s}
	if p.history {
		answer.History, err = p.readHistory(ctx, cfg)
		if err != nil {
			return err
		}
	}
	if p.output == "json" {
		return cli.WriteJSON(w, answer, "")
	}
	return answer.write(w, width)
}

// readHistory reads the shares of the last hour from a replica.
func (p *poolStatus) readHistory(ctx context.Context, cfg config.Config) (list []admin.ShareHistory, err error) {
	addr, err := adminURL("--addr", cmp.Or(p.addr, cfg.Listen))
	if err != nil {
		return nil, err
	}
	body, err := get(ctx, strings.TrimSuffix(addr, "/")+"/shares")
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("history: %w: check that the admin server of a replica is at %s (--addr)", err, addr)
	}
	return list, nil
}

// poolAnswer is the output of the command pool status.
type poolAnswer struct {
	Coordinator string `json:"coordinator"` // empty if there is none
	Epoch       int64  `json:"epoch"`       // of the coordinator's term
	pool.Status

	History []admin.ShareHistory `json:"history,omitempty"` // of the last hour
}

func (a poolAnswer) write(w io.Writer, width int) error {
	coordinator := "none: shares do not change, and grants are not renewed"
	if a.Coordinator != "" {
		coordinator = fmt.Sprintf("%s, elected in epoch %d", a.Coordinator, a.Epoch)
	}
	errs := []error{terminal.WritePairs(w, width, []terminal.Pair{
		{Name: "coordinator", Text: coordinator}, {Name: "pools", Text: fmt.Sprintf("version %d", a.Version)}})}
	warnUnreadable(w, width, a.Status)
	for _, p := range a.Pools {
		errs = append(errs, line(w, ""), paragraph(w, width, terminal.Text(p.Name)+"  "+a.head(p)), remarks(w, width, p),
			writeRegions(w, width, p), a.writeHistory(w, width, p.Name))
	}
	if len(a.Pools) == 0 {
		errs = append(errs, line(w, "\nno pools"))
	}
	return errors.Join(errs...)
}

// head describes a pool.
func (a poolAnswer) head(p pool.PoolStatus) string {
	claimed := 0.0
	for _, r := range p.Regions {
		claimed += r.Claimed
	}
	rate := fmt.Sprintf("%s, capacity %d", p.Rate, p.Capacity)
	switch {
	case p.Rate == "" && a.Unreadable["cfg"] != "":
		rate = "its settings can't be read"
	case p.Rate == "":
		rate = "no longer configured"
	}
	return fmt.Sprintf("%s; at most %s in use", rate, perSecond(claimed))
}

// remarks writes why a pool can't lend, and which rates may be in use beyond its claims.
func remarks(w io.Writer, width int, p pool.PoolStatus) error {
	var errs []error
	var doubled []string
	var unknown, uses, granted bool
	for _, r := range p.Regions {
		unknown = unknown || !r.Known()
		uses = uses || r.Reported && r.Fenced == nil
		granted = granted || r.Alive && r.Remaining > 0
		if r.OtherServer {
			doubled = append(doubled, r.Region)
		}
	}
	if len(p.Waits) > 0 {
		errs = append(errs, paragraph(w, width,
			"closed: regions have only their floors until these regions acknowledge it or are fenced: "+
				strings.Join(p.Waits, ", ")))
	} else if p.Open && uses && !granted {
		errs = append(errs, paragraph(w, width,
			"no living region has a grant, only its floor; these shares may be outdated"))
	}
	if unknown {
		errs = append(errs, line(w, "regions in an unknown state may use more until earlier grants end"))
	}
	if len(doubled) > 0 {
		errs = append(errs, paragraph(w, width, "CAUTION: more than one Redis reports for "+strings.Join(doubled, ", ")+
			". One has the share, and another one has the floor in addition."))
	}
	return errors.Join(errs...)
}

// grantColumns is the length of the longest text about a grant that fits the table. Longer texts are written below the
// table.
const grantColumns = len("renewed 0.5 s ago")

// writeRegions writes the regions of a pool as a table. Texts about grants that are too long for the table follow
// below.
func writeRegions(w io.Writer, width int, p pool.PoolStatus) error {
	t := terminal.NewTable(terminal.Column{Name: "REGION", Text: true}, number("SHARE", 0), number("FLOOR", 0),
		number("DEMAND", 0), number("CLAIMED", 1), number("TOKENS", 0), number("STATE", 2), terminal.Column{Name: "GRANT"})
	var below []terminal.Pair
	for _, r := range p.Regions {
		text := grant(r)
		if len(text) > grantColumns {
			below = append(below, terminal.Pair{Name: r.Region, Text: text})
			text = "see below"
		}
		t.Row(r.Region, perSecond(r.Granted), perSecond(r.Floor), perSecond(r.Demand), perSecond(r.Claimed),
			fmt.Sprintf("%d/%d", r.Tokens, r.Capacity), state(r), text)
	}
	return errors.Join(t.Write(w, width), terminal.WritePairs(w, cmp.Or(width, proseColumns), below))
}

// proseColumns is the width of prose if the output is not a terminal.
const proseColumns = 80

// paragraph writes prose in lines that fit the width.
func paragraph(w io.Writer, width int, text string) error {
	return line(w, strings.Join(terminal.Wrap(text, cmp.Or(width, proseColumns)), "\n"))
}

// writeHistory draws the shares of a pool in the last hour.
func (a poolAnswer) writeHistory(w io.Writer, width int, name string) error {
	t := terminal.NewTable(terminal.Column{Text: true}, terminal.Column{})
	known := false
	for _, h := range a.History {
		if h.Pool == name {
			t.Row(h.Region, terminal.Spark(h.Minutes))
			known = true
		}
	}
	if !known {
		return nil
	}
	return errors.Join(line(w, "part of the rate in each minute of the last hour:"), t.Write(w, width))
}

// owedFloor describes a region whose fence was lifted. Its floor stays reserved.
const owedFloor = "gets its floor when it reports"

// grant describes a region's grant, or why there is none.
func grant(r pool.RegionStatus) string {
	switch {
	case r.Fenced != nil:
		return declared(r)
	case r.Unreadable:
		return "can't be read"
	case !r.Configured:
		return "leaving"
	case !r.Reported:
		return "has not reported, and may use an earlier grant"
	case r.Bucket == "plain":
		return "has an ordinary bucket instead of the pool's"
	}
	switch {
	case !r.Alive && r.Granted == 0:
		return owedFloor
	case !r.Alive && r.Remaining > 0:
		return fmt.Sprintf("had %.0f s left", r.Remaining)
	case !r.Alive:
		return "was on its floor"
	case !r.Applied:
		return "not acknowledged"
	default:
		return admin.Grant(r.Age, r.Remaining)
	}
}

// warnUnreadable writes which records can't be read, and the reasons.
func warnUnreadable(w io.Writer, width int, s pool.Status) {
	for _, key := range slices.Sorted(maps.Keys(s.Unreadable)) {
		_ = paragraph(w, width, fmt.Sprintf("CAUTION: %s can't be read: %s", key, terminal.Text(s.Unreadable[key])))
	}
}

// declared describes the fence or drain that an operator has declared for a region.
func declared(r pool.RegionStatus) string {
	how := "fenced"
	switch f := r.Fenced; {
	case f.Drain && r.Idle():
		how = "drained"
	case f.Drain:
		how = "has not acknowledged its drain, requested"
	}
	return fmt.Sprintf("%s by %s at %s: %s", how, r.Fenced.Operator, r.Fenced.At.UTC().Format(time.DateTime),
		r.Fenced.Reason)
}

func perSecond(rate float64) string { return fmt.Sprintf("%.4g/s", rate) }

// state returns a word for whether the region reports.
func state(r pool.RegionStatus) string {
	switch {
	case r.Alive:
		return "alive"
	case r.Reporter == "":
		return "unknown"
	}
	return "silent"
}
