package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/policy"
)

// ErrNotFenced is returned by Lift for a region that isn't fenced.
var ErrNotFenced = errors.New("pool: region is not fenced")

// Fencing is an operator's declaration that a region uses nothing of any pool.
type Fencing struct {
	Operator string    `json:"operator"`
	Reason   string    `json:"reason,omitempty"`
	At       time.Time `json:"at"`
}

// Fence declares that a region uses nothing of any pool below the prefix, so
// that all it had, its floors too, is free for the others at once. It is for a
// region whose Redis is known to be gone: if its consumers take on, the pools'
// rates are exceeded by what it had. Until Lift, the region is granted nothing.
func Fence(ctx context.Context, client *clientv3.Client, prefix, region string, f Fencing) error {
	if !validName(region) {
		return fmt.Errorf("%w: region %q: want 1 to %d letters, digits and any of . _ : -", ErrPool, region, MaxName)
	}
	value, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("pool: fence: %w", err)
	}
	_, err = newEtcdRegistry(client, prefix).put(ctx, fenceKeys+region, string(value))
	return err
}

// Lift ends a fence. The region gets its floor and a share as soon as there is
// something free.
func Lift(ctx context.Context, client *clientv3.Client, prefix, region string) error {
	r := newEtcdRegistry(client, prefix)
	entries, _, err := r.load(ctx, fenceKeys+region)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("%w: %q", ErrNotFenced, region)
	}
	_, v, err := r.commit(ctx, office{}, []write{{key: fenceKeys + region, seen: entries[0].revision, remove: true}})
	if err == nil && v != committed {
		err = fmt.Errorf("%w: %q has just changed", ErrNotFenced, region)
	}
	return err
}

// ReadSettings reads the settings in force below a prefix; found is false if there are none.
func ReadSettings(ctx context.Context, client *clientv3.Client, prefix string) (s Settings, found bool, err error) {
	entries, _, err := newEtcdRegistry(client, prefix).load(ctx, configKey)
	if err != nil || len(entries) == 0 {
		return Settings{}, false, err
	}
	if s, err = decodeSettings(entries[0].value); err != nil {
		return Settings{}, true, fmt.Errorf("%s: %w", configKey, err)
	}
	return s, true, nil
}

// Status is what etcd holds of all pools below a prefix.
type Status struct {
	Version int64        `json:"version"` // of the settings in force
	Pools   []PoolStatus `json:"pools"`
}

// PoolStatus is one pool's.
type PoolStatus struct {
	Name     string         `json:"name"`
	Rate     string         `json:"rate,omitempty"` // empty: it has left the configuration
	Capacity int64          `json:"capacity,omitempty"`
	Regions  []RegionStatus `json:"regions"`
}

// RegionStatus is one region's part in a pool. Rates are tokens per second.
type RegionStatus struct {
	Region     string    `json:"region"`
	Granted    float64   `json:"granted"`              // by the newest grant, floor included
	Floor      float64   `json:"floor"`                // of it
	Capacity   int64     `json:"capacity"`             // of the region's bucket
	Demand     float64   `json:"demand"`               // what it could use, as the coordinator saw it
	Age        float64   `json:"grant_age_seconds"`    // of the newest grant, at the region's last report
	Remaining  float64   `json:"remaining_seconds"`    // of the newest grant, at the region's last report; 0: it is on its floor
	Applied    bool      `json:"applied"`              // the region has acknowledged the newest grant
	Claimed    float64   `json:"claimed"`              // the most that it may be using
	Tokens     int64     `json:"tokens"`               // at its last report
	Reported   bool      `json:"reported"`             // it has ever reported
	At         time.Time `json:"reported_at,omitzero"` // of its last report, on the clock of its Redis
	Reporter   string    `json:"reporter"`             // the agent that reported last
	Fenced     *Fencing  `json:"fenced"`               // not null: an operator has declared that it uses nothing
	Configured bool      `json:"configured"`
}

// ReadStatus reads the pools below a prefix.
func ReadStatus(ctx context.Context, client *clientv3.Client, prefix string) (Status, error) {
	return readStatus(ctx, newEtcdRegistry(client, prefix))
}

func readStatus(ctx context.Context, r registry) (Status, error) {
	entries, _, err := r.load(ctx)
	if err != nil {
		return Status{}, err
	}
	var out Status
	pools := map[string]map[string]*RegionStatus{}
	at := func(pool, region string) *RegionStatus {
		if pools[pool] == nil {
			pools[pool] = map[string]*RegionStatus{}
		}
		if pools[pool][region] == nil {
			pools[pool][region] = &RegionStatus{Region: region}
		}
		return pools[pool][region]
	}
	configured := map[string]Pool{}
	shares, reports, fenced := map[string]share{}, map[string]report{}, map[string]*Fencing{}
	for _, e := range entries {
		var err error
		if region, ok := e.under(shareKeys); ok {
			shares[region], err = decodeShare(e.value)
		} else if region, ok := e.under(reportKeys); ok {
			reports[region], err = decodeReport(e.value)
		} else if region, ok := e.under(fenceKeys); ok {
			fenced[region] = &Fencing{}
			err = json.Unmarshal([]byte(e.value), fenced[region])
		} else if e.key == configKey {
			var s Settings
			s, err = decodeSettings(e.value)
			out.Version = s.Version
			for _, p := range s.Pools {
				configured[p.Name] = p
				for _, r := range p.Regions {
					at(p.Name, r.Name).Configured = true
				}
			}
		}
		if err != nil {
			return Status{}, fmt.Errorf("%s: %w", e.key, err)
		}
	}
	for region, s := range shares {
		for pool, list := range s.terms {
			r := at(pool, region)
			r.fill(list, reports[region], pool, s.lease)
			r.Demand = float64(s.demand[pool]) * 1e6 / float64(list[0].Per)
		}
	}
	for pool, regions := range pools {
		p := PoolStatus{Name: pool, Regions: []RegionStatus{}}
		if c, ok := configured[pool]; ok {
			p.Rate, p.Capacity = c.Rate.String(), c.Capacity
		}
		for region, r := range regions {
			r.Fenced = fenced[region]
			p.Regions = append(p.Regions, *r)
		}
		sort.Slice(p.Regions, func(i, j int) bool { return p.Regions[i].Region < p.Regions[j].Region })
		out.Pools = append(out.Pools, p)
	}
	sort.Slice(out.Pools, func(i, j int) bool { return out.Pools[i].Name < out.Pools[j].Name })
	return out, nil
}

// fill takes in the region's grants, newest first, and its last report.
func (s *RegionStatus) fill(list []policy.Terms, r report, pool string, lease time.Duration) {
	perSecond := func(n int64, t policy.Terms) float64 { return float64(n) * 1e6 / float64(t.Per) }
	newest := list[0]
	s.Floor, s.Capacity = perSecond(newest.Tokens, newest), newest.Capacity
	s.Granted = max(s.Floor, perSecond(newest.GrantTokens, newest))
	ticket, reported := r.tickets[pool]
	s.Reporter = r.agent
	if s.Reported = reported; reported {
		s.Tokens, s.Applied, s.At = ticket.Tokens, !ticket.Fence.Before(newest.Fence), time.UnixMicro(ticket.Now).UTC()
		if newest.GrantTokens > 0 && newest.GrantEra == ticket.Version.Era {
			s.Remaining = max(0, float64(newest.GrantEnd-ticket.Now)/1e6)
			s.Age = max(0, lease.Seconds()-s.Remaining)
		}
	}
	for _, t := range list {
		if !t.Fence.Before(ticket.Fence) {
			s.Claimed = max(s.Claimed, perSecond(t.Tokens, t), perSecond(t.GrantTokens, t))
		}
	}
}
