package replica

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/pool"
)

const (
	// regionsEvery is the time between two readings of all regions' shares from etcd. It is so short that every slot of a
	// trend gets a reading.
	regionsEvery = stats.TrendSlot / 2
	// regionsTimeout bounds one read of etcd.
	regionsTimeout = 2 * time.Second
)

// regions keeps the recent shares of all regions in the pools, for the status page. Only the page depends on them. So
// etcd is read rarely, and not at all if there are more shares than can have a trend.
type regions struct {
	read    func(context.Context) (pool.Status, error)
	trends  stats.Shares // by pool and region
	reports map[string]seenReport

	mu    sync.Mutex
	names map[string][]string // of the regions, by pool
}

// seenReport is a region's last report about a pool, and the time at which this process first read it. The time in the
// report is not used, because the clocks of regions may differ.
type seenReport struct{ at, seen time.Time }

// follow reads the shares until ctx ends. The trends have no points for times in which etcd doesn't answer.
func (r *regions) follow(ctx context.Context, cfg func() config.Config) {
	ticker := time.NewTicker(regionsEvery)
	defer ticker.Stop()
	for {
		r.refresh(ctx, cfg().Pools)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// refresh reads the shares once.
func (r *regions) refresh(ctx context.Context, pools []pool.Pool) {
	rates, shares := map[string]float64{}, 0
	for _, p := range pools {
		rates[p.Name] = perSecond(p.Rate)
		shares += len(p.Regions)
	}
	if shares > stats.MaxShares {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, regionsTimeout)
	defer cancel()
	status, err := r.read(ctx)
	if err != nil {
		return // the page shows the error of etcd
	}
	now := time.Now()
	points := map[string]stats.SharePoint{}
	names := map[string][]string{}
	reports := map[string]seenReport{}
	for _, p := range status.Pools {
		for _, region := range p.Regions {
			rate, key := rates[p.Name], trendKey(p.Name, region.Region)
			if rate == 0 {
				continue // the pool was removed from the configuration
			}
			report := r.reports[key]
			if !report.at.Equal(region.At) {
				report = seenReport{region.At, now}
			}
			reports[key] = report
			points[key] = pointOf(region, rate, now.Sub(report.seen))
			names[p.Name] = append(names[p.Name], region.Region)
		}
	}
	r.reports = reports
	r.trends.Add(now, points)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names = names
}

// trendKey returns the key of the trend of a region in a pool. It is unique because names have no slash.
func trendKey(pool, region string) string { return pool + "/" + region }

// pointOf returns the part of a pool's rate that a region may use at a time after its last report. That is its grant
// until the grant ends, and then its floor.
func pointOf(r pool.RegionStatus, rate float64, since time.Duration) stats.SharePoint {
	switch {
	case r.Fenced != nil && !r.Fenced.Drain:
		return stats.SharePoint{}
	case !r.Reported || r.Remaining <= since.Seconds():
		return stats.SharePoint{Floor: r.Floor / rate}
	}
	floor := min(r.Floor, r.Granted)
	return stats.SharePoint{Floor: floor / rate, Lent: (r.Granted - floor) / rate}
}

// hour returns the shares of all regions in all pools in the last hour, by pool and region.
func (r *regions) hour(now time.Time) []admin.ShareHistory {
	r.mu.Lock()
	names := r.names // replaced, never changed
	r.mu.Unlock()
	list := []admin.ShareHistory{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for _, region := range slices.Sorted(slices.Values(names[name])) {
			list = append(list, admin.ShareHistory{
				Pool: name, Region: region, Minutes: r.trends.Hour(trendKey(name, region), now),
			})
		}
	}
	return list
}

// of returns the regions of a pool by name, each with its trend.
func (r *regions) of(name string, now time.Time) (list []admin.RegionShare) {
	r.mu.Lock()
	names := slices.Sorted(slices.Values(r.names[name]))
	r.mu.Unlock()
	for _, region := range names {
		one := admin.RegionShare{Region: region}
		for _, p := range r.trends.Trend(trendKey(name, region), now) {
			one.Trend = append(one.Trend, admin.ShareTrendPoint(p))
		}
		list = append(list, one)
	}
	return list
}
