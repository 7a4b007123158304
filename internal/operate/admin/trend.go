package admin

import (
	"fmt"
	"strings"
)

// trendHeight is the height of the box in which a trend is drawn, in units. The page scales the box.
const trendHeight = 24

// Width returns the width of the drawn trend in units.
func (t Trend) Width() int { return max(1, len(t)) }

// Height returns the height of the drawn trend in units.
func (t Trend) Height() int { return trendHeight }

// FillArea returns the outline of the fill over time, as the path of an SVG. It has one area for each known period.
func (t Trend) FillArea() string {
	var b strings.Builder
	for i, p := range t {
		if !p.Known {
			continue
		}
		top := trendHeight * (1 - min(1, max(0, p.Fill)))
		fmt.Fprintf(&b, "M%d %dV%.1fH%dV%dZ", i, trendHeight, top, i+1, trendHeight)
	}
	return b.String()
}

// TakenLine returns the rate of takes over time, as the path of an SVG. The highest rate has the full height.
func (t Trend) TakenLine() string {
	most := t.MostTaken()
	if most == 0 {
		return ""
	}
	var b strings.Builder
	draw := "M"
	for i, p := range t {
		if !p.Known {
			draw = "M"
			continue
		}
		// One unit stays free above and below the line. Otherwise the edges of the box would cut it.
		fmt.Fprintf(&b, "%s%.1f %.1f", draw, float64(i)+0.5, 1+(trendHeight-2)*(1-p.Taken/most))
		draw = "L"
	}
	return b.String()
}

// MostTaken returns the highest rate of takes, in tokens per second.
func (t Trend) MostTaken() float64 {
	most := 0.0
	for _, p := range t {
		most = max(most, p.Taken)
	}
	return most
}

// LeastFill returns the lowest known fill, as a part of the capacity. It returns 1 if no fill is known.
func (t Trend) LeastFill() float64 {
	least := 1.0
	for _, p := range t {
		if p.Known {
			least = min(least, max(0, p.Fill))
		}
	}
	return least
}

// ShareTrend is the history of a share in periods of the same length, the oldest first, in parts of the pool's rate.
type ShareTrend []ShareTrendPoint

// ShareTrendPoint is the state of a share in a period.
type ShareTrendPoint struct {
	Known               bool
	Floor, Lent, Demand float64
}

// Width returns the width of the drawn trend in units.
func (t ShareTrend) Width() int { return max(1, len(t)) }

// Height returns the height of the drawn trend in units. The full height is the pool's rate.
func (t ShareTrend) Height() int { return trendHeight }

// FloorBand returns the floor over time, as the path of an SVG.
func (t ShareTrend) FloorBand() string {
	return t.band(func(p ShareTrendPoint) (from, to float64) { return 0, p.Floor })
}

// LentBand returns the part of the rate that is lent beyond the floor, drawn on top of the floor.
func (t ShareTrend) LentBand() string {
	return t.band(func(p ShareTrendPoint) (from, to float64) { return p.Floor, p.Floor + p.Lent })
}

// DemandLine returns the demand over time, cut off at the pool's rate.
func (t ShareTrend) DemandLine() string {
	var b strings.Builder
	for i, p := range t {
		if p.Known {
			fmt.Fprintf(&b, "M%d %.1fH%d", i, min(trendHeight-0.5, max(0.5, shareY(p.Demand))), i+1)
		}
	}
	return b.String()
}

func (t ShareTrend) band(of func(ShareTrendPoint) (from, to float64)) string {
	return band(len(t), func(i int) (from, to float64) {
		if !t[i].Known {
			return 0, 0
		}
		return of(t[i])
	})
}

// band draws a band over a number of periods. Neighbouring periods with the same height form one area.
func band(stretches int, of func(i int) (from, to float64)) string {
	var b strings.Builder
	for begin := 0; begin < stretches; {
		from, to := of(begin)
		end := begin + 1
		for ; end < stretches; end++ {
			if f, t := of(end); f != from || t != to {
				break
			}
		}
		if to > from {
			fmt.Fprintf(&b, "M%d %.1fV%.1fH%dV%.1fZ", begin, shareY(from), shareY(to), end, shareY(from))
		}
		begin = end
	}
	return b.String()
}

// regionColours is the number of colours that the page has for regions.
const regionColours = 6

// RegionBand is a region's share of a pool over time, as the page draws it.
type RegionBand struct {
	Region string
	Colour int
	Path   string   // of an SVG
	Now    *float64 // present share in parts of the pool's rate; nil if not known
}

// Stack draws the shares of all regions on top of each other, the first one at the bottom.
func (s Share) Stack() []RegionBand {
	var list []RegionBand
	below := map[int]float64{} // the height so far, by period
	for n, r := range s.Regions {
		one := RegionBand{Region: r.Region, Colour: n % regionColours}
		part := func(i int) float64 { return r.Trend[i].Floor + r.Trend[i].Lent }
		one.Path = band(len(r.Trend), func(i int) (from, to float64) { return below[i], below[i] + part(i) })
		for i, p := range r.Trend {
			below[i] += part(i)
			if p.Known && i >= len(r.Trend)-2 { // the last period may have just begun, so the one before it counts too
				now := part(i)
				one.Now = &now
			}
		}
		list = append(list, one)
	}
	return list
}

// shareY returns the distance from the top at which a part of the pool's rate is drawn.
func shareY(part float64) float64 { return trendHeight * (1 - min(1, max(0, part))) }

// Bands has the parts of a region's share, in hundredths of the pool's rate.
type Bands struct {
	Floor, Lent, Demand float64
	text                string
}

// String returns the bands in words.
func (b Bands) String() string { return b.text }

// Bands returns the bands of the share. It returns nil if the pool was removed from the configuration.
func (s Share) Bands() *Bands {
	if s.Limit == 0 {
		return nil
	}
	part := func(rate float64) float64 { return 100 * min(1, rate/s.Limit) }
	return &Bands{
		Floor: part(min(s.Floor, s.Rate)), Lent: part(max(0, s.Rate-s.Floor)), Demand: min(part(s.Demand), 99),
		text: fmt.Sprintf("%s/s of %s/s, of which %s/s are the floor; the demand is %s/s",
			decimal(s.Rate), decimal(s.Limit), decimal(s.Floor), decimal(s.Demand)),
	}
}
