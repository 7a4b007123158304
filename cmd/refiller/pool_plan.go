package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/pool"
)

func poolPlanCommand(e env) *cobra.Command {
	var output string
	conn := connection{env: e}
	cmd := &cobra.Command{
		Use:   "plan FILE|-",
		Short: "Show what each region would get with another configuration",
		Long: `Show how much of each pool each region would get with another configuration. The command divides the pools as
the coordinator would, by the present demand of the regions. It writes nothing. If FILE is -, it reads stdin.

These are the columns of the table:

    NOW        the share of the region now, in tokens per second
    THEN       its share when all regions have acknowledged the change
    FLOOR NOW  the part of NOW that is guaranteed
    FLOOR      the part of THEN that is guaranteed
    DEMAND     the rate that the region could use, at most the pool's rate now

Shares that shrink change before shares that grow. A silent region keeps its floor. A region that has never reported
counts as a region without demand.

The addresses of etcd are read from the configuration. To see which fields would change, run "refiller diff".`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := loadFile(e, args[0], "", conn.fromFlags)
			if err != nil {
				return err
			}
			if !cfg.Pooled() {
				return cli.Usage(fmt.Errorf("%s has no field pools, so it would change no pool", args[0]))
			}
			s, err := readPools(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			warnUnreadable(e.Stderr, terminal.Of(e.Stderr, e.Environ).Width(), s)
			plan := planPools(s, pool.Settings{Version: cfg.PoolsVersion, Pools: cfg.Pools})
			if output == "json" {
				return cli.WriteJSON(e.Stdout, plan, "")
			}
			return plan.write(e.Stdout, terminal.Of(e.Stdout, e.Environ).Width())
		},
	}
	conn.addServerFlags(cmd, "etcd", "pool-registry")
	cli.OutputFlag(cmd, &output)
	return cmd
}

// readPools reads the pools in the etcd that a configuration names.
func readPools(ctx context.Context, cfg config.Config) (pool.Status, error) {
	client, err := etcdconn.Open(cfg.PoolRegistry.Options)
	if err != nil {
		return pool.Status{}, err
	}
	defer func() { _ = client.Close() }() // only read, so the error doesn't matter
	ctx, cancel := context.WithTimeout(ctx, operateTimeout)
	defer cancel()
	s, err := pool.ReadLiveStatus(ctx, client, cfg.PoolsPrefix())
	return s, withEtcdAddresses(err, cfg)
}

// plan is the output of the command pool plan. Rates are in tokens per second.
type plan struct {
	Version int64         `json:"version"` // of the file's pools
	InForce int64         `json:"version_in_force"`
	Ignored bool          `json:"ignored"` // the file's pools differ, but their version isn't higher
	Pools   []plannedPool `json:"pools"`
}

// plannedPool is a pool now and as the file configures it. If the pool is added or removed, it has the fields of only
// one of the two. Until the regions in Waits have acknowledged the change, all regions get only their floors.
type plannedPool struct {
	Name        string          `json:"name"`
	Change      string          `json:"change"` // added, changed, removed or none
	RateNow     string          `json:"rate_now,omitempty"`
	Rate        string          `json:"rate,omitempty"`
	CapacityNow int64           `json:"capacity_now,omitempty"`
	Capacity    int64           `json:"capacity,omitempty"`
	Waits       []string        `json:"waits,omitempty"` // regions that have not acknowledged the change
	Regions     []plannedRegion `json:"regions"`
}

// plannedRegion is a region's part in a pool, now and after the change.
type plannedRegion struct {
	Region   string  `json:"region"`
	Change   string  `json:"change"` // joins, leaves or none
	State    string  `json:"state"`  // alive, silent, unheard (it has never reported), fenced or drained
	Now      float64 `json:"now"`    // its granted rate, floor included
	Then     float64 `json:"then"`
	FloorNow float64 `json:"floor_now"`
	Floor    float64 `json:"floor"`
	Demand   float64 `json:"demand"`
}

// planPools divides the pools of next among the regions in their present states.
func planPools(s pool.Status, next pool.Settings) plan {
	p := plan{Version: next.Version, InForce: s.Version, Pools: []plannedPool{},
		Ignored: next.Version <= s.Version && !next.Equal(s.Settings)}
	states := statesOf(s)
	before, was := map[string]pool.PoolStatus{}, map[string]pool.Pool{}
	for _, b := range s.Pools {
		before[b.Name] = b
	}
	for _, b := range s.Settings.Pools {
		was[b.Name] = b
	}
	for _, n := range next.Pools {
		one := planPool(before[n.Name], n, states)
		if one.Change == "none" && len(config.PoolDifferences(was[n.Name], n)) > 0 {
			one.Change = "changed"
		}
		p.Pools = append(p.Pools, one)
		delete(before, n.Name)
	}
	for _, b := range before {
		if b.Rate != "" { // without a rate, the pool was removed earlier
			p.Pools = append(p.Pools, planPool(b, pool.Pool{Name: b.Name}, states))
		}
	}
	slices.SortFunc(p.Pools, func(a, b plannedPool) int { return strings.Compare(a.Name, b.Name) })
	return p
}

// statesOf returns the states of the regions by name. A region that isn't in the map has never reported.
func statesOf(s pool.Status) map[string]string {
	states := map[string]string{}
	for _, p := range s.Pools {
		for _, r := range p.Regions {
			switch {
			case !r.Reported:
			case r.Alive:
				states[r.Region] = "alive"
			case states[r.Region] == "":
				states[r.Region] = "silent"
			}
		}
	}
	for region, f := range s.Fences {
		states[region] = "fenced"
		if f.Drain {
			states[region] = "drained"
		}
	}
	return states
}

// planPool divides a pool among its regions. If next has no regions, the pool is removed.
func planPool(before pool.PoolStatus, next pool.Pool, states map[string]string) plannedPool {
	p := plannedPool{Name: next.Name, Change: "none", RateNow: before.Rate, CapacityNow: before.Capacity,
		Capacity: next.Capacity, Regions: []plannedRegion{}}
	regions, joined := regionsOf(before, next, states)
	switch {
	case len(next.Regions) == 0:
		p.Change = "removed"
	case p.RateNow == "":
		p.Change = "added"
		fallthrough
	default:
		p.Rate = next.Rate.String()
		divide(next, regions)
	}
	for _, r := range next.Regions {
		if !before.Open && !joined[r.Name] && states[r.Name] != "fenced" {
			p.Waits = append(p.Waits, r.Name)
		}
	}
	slices.Sort(p.Waits)
	for _, region := range slices.Sorted(maps.Keys(regions)) {
		p.Regions = append(p.Regions, *regions[region])
	}
	return p
}

// regionsOf returns, by name, the regions that have a part in a pool before or after the change. joined reports for
// each whether it has acknowledged the pool's terms.
func regionsOf(before pool.PoolStatus, next pool.Pool, states map[string]string) (map[string]*plannedRegion,
	map[string]bool) {
	regions, joined := map[string]*plannedRegion{}, map[string]bool{}
	add := func(region, change string) *plannedRegion {
		state, ok := states[region]
		if !ok {
			state = "unheard"
		}
		regions[region] = &plannedRegion{Region: region, Change: change, State: state}
		return regions[region]
	}
	for _, r := range next.Regions {
		add(r.Name, "joins")
	}
	for _, r := range before.Regions {
		one := regions[r.Region]
		switch {
		case one == nil && !r.Configured:
			continue // it left the pool earlier
		case one == nil:
			one = add(r.Region, "leaves")
		case r.Configured:
			one.Change = "none"
		}
		one.Now = r.Granted
		one.FloorNow = r.Floor
		one.Demand = r.Demand
		joined[r.Region] = r.Joined
	}
	return regions, joined
}

// divide sets the rates and floors that the regions of a pool get after the change.
func divide(p pool.Pool, regions map[string]*plannedRegion) {
	demand, silent := map[string]float64{}, map[string]float64{}
	for name, r := range regions {
		switch r.State {
		case "alive", "unheard":
			demand[name] = r.Demand
		case "silent":
			silent[name] = r.FloorNow
		}
	}
	floors := p.Floors()
	for name, then := range p.Divide(demand, silent) {
		regions[name].Then, regions[name].Floor = then, floors[name]
	}
}

func (p plan) write(w io.Writer, width int) error {
	version := fmt.Sprintf("version %d in the file, version %d in force", p.Version, p.InForce)
	if p.Ignored {
		version += ": replicas would ignore the file until its version is higher"
	}
	errs := []error{terminal.WritePairs(w, width, []terminal.Pair{{Name: "pools", Text: version}})}
	for _, one := range p.Pools {
		t := terminal.NewTable(terminal.Column{Name: "REGION", Text: true}, number("NOW", 0), number("THEN", 0),
			number("FLOOR NOW", 2), number("FLOOR", 1), number("DEMAND", 0), terminal.Column{Name: "NOTE"})
		for _, r := range one.Regions {
			t.Row(r.Region, perSecond(r.Now), perSecond(r.Then), perSecond(r.FloorNow), perSecond(r.Floor),
				perSecond(r.Demand), r.remarks(one.Change))
		}
		head := terminal.Wrap(terminal.Text(one.Name)+"  "+one.head(), width)
		errs = append(errs, line(w, "\n"+strings.Join(head, "\n")))
		errs = append(errs, t.Write(w, width))
	}
	if len(p.Pools) == 0 {
		errs = append(errs, line(w, "\nno pools"))
	}
	return errors.Join(errs...)
}

// head describes the change of a pool.
func (p plannedPool) head() string {
	from := func(before, after any, same bool) string {
		if same {
			return fmt.Sprint(after)
		}
		return fmt.Sprint(before, " → ", after)
	}
	switch p.Change {
	case "removed":
		return fmt.Sprintf("removed: %s, capacity %d", p.RateNow, p.CapacityNow)
	case "added":
		p.RateNow, p.CapacityNow = p.Rate, p.Capacity
	}
	text := from(p.RateNow, p.Rate, p.RateNow == p.Rate) + ", capacity " +
		from(p.CapacityNow, p.Capacity, p.CapacityNow == p.Capacity)
	if p.Change == "added" {
		text = "added: " + text
	}
	if len(p.Waits) > 0 {
		text += "; only floors until these regions acknowledge it: " + strings.Join(p.Waits, ", ")
	}
	return text
}

// remarks lists the unusual facts about a region.
func (r plannedRegion) remarks(pool string) string {
	var list []string
	if r.Change != "none" && pool != "added" && pool != "removed" {
		list = append(list, r.Change)
	}
	switch {
	case r.State == "alive":
	case r.State == "silent" && r.Now == 0 && r.Change == "none":
		list = append(list, "silent: "+owedFloor)
	case r.State == "silent":
		list = append(list, "silent: keeps its floor") // even if it leaves, until it acknowledges the change
	case r.State == "unheard":
		list = append(list, "has never reported")
	default:
		list = append(list, r.State)
	}
	return strings.Join(list, ", ")
}
