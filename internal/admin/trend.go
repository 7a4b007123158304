package admin

import (
	"fmt"
	"strings"
)

// A trend is drawn in a box of so many units; the page scales it.
const trendHeight = 24

// Width is how many units wide a drawn trend is.
func (t Trend) Width() int { return max(1, len(t)) }

// Height is how many units high a drawn trend is.
func (t Trend) Height() int { return trendHeight }

// FillArea is the outline of the fill over time, as the path of an SVG: one area for each stretch of time that is known.
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

// TakenLine is the takes over time, as the path of an SVG, at the scale of the most of them.
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
		// Half a unit of room above and below, or the line is cut.
		fmt.Fprintf(&b, "%s%.1f %.1f", draw, float64(i)+0.5, 1+(trendHeight-2)*(1-p.Taken/most))
		draw = "L"
	}
	return b.String()
}

// MostTaken is the highest rate of takes, in tokens per second.
func (t Trend) MostTaken() float64 {
	most := 0.0
	for _, p := range t {
		most = max(most, p.Taken)
	}
	return most
}

// LeastFill is the lowest fill that is known, as a part of the capacity; 1 if none is.
func (t Trend) LeastFill() float64 {
	least := 1.0
	for _, p := range t {
		if p.Known {
			least = min(least, max(0, p.Fill))
		}
	}
	return least
}
