package main

import (
	"fmt"
	"image/color"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// chartGoroutines is the number of goroutines of the cells in the chart. If a workload has no such cell, its cell with
// the next lower number is drawn.
const chartGoroutines = 64

var (
	ourColor   = color.RGBA{0x1b, 0x7f, 0x5c, 0xff}
	otherColor = color.RGBA{0x8a, 0x93, 0x9e, 0xff}
	floorColor = color.RGBA{0xd0, 0xd5, 0xdb, 0xff}
)

// writeChart draws a panel of bars for each workload. They show takes per second on a
// logarithmic scale.
func (r *report) writeChart(path string) error {
	cells := r.chartCells()
	if len(cells) == 0 {
		return fmt.Errorf("chart: nothing was measured at %d goroutines or fewer", chartGoroutines)
	}
	const (
		width = 26 * vg.Centimeter
		row   = 0.62 * vg.Centimeter
		head  = 1.6 * vg.Centimeter
	)
	height := vg.Length(0)
	for _, c := range cells {
		height += head + row*vg.Length(len(c.Contenders))
	}
	svg := vgsvg.NewWith(vgsvg.UseWH(width, height), vgsvg.EmbedFonts(false))
	canvas := draw.New(svg)
	canvas.SetColor(color.White)
	canvas.Fill(canvas.Path())
	most := float64(least)
	for _, c := range cells {
		for _, f := range c.Contenders {
			most = max(most, f.Median.PerSecond)
		}
	}
	top := canvas.Max.Y
	for _, c := range cells {
		bottom := top - head - row*vg.Length(len(c.Contenders))
		panel := draw.Canvas{Canvas: canvas.Canvas, Rectangle: vg.Rectangle{
			Min: vg.Point{X: canvas.Min.X + 0.3*vg.Centimeter, Y: bottom},
			Max: vg.Point{X: canvas.Max.X - 1.5*vg.Centimeter, Y: top - 0.3*vg.Centimeter},
		}}
		c.panel(most).Draw(panel)
		top = bottom
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	if _, err := svg.WriteTo(f); err != nil {
		_ = f.Close()
		return fmt.Errorf("chart: %w", err)
	}
	return f.Close()
}

// chartCells returns one cell of each workload.
func (r *report) chartCells() []cell {
	var out []cell
	for _, w := range workloads {
		var best *cell
		for i, c := range r.Cells {
			if c.Workload == w.name && c.Goroutines <= chartGoroutines && (best == nil || c.Goroutines > best.Goroutines) {
				best = &r.Cells[i]
			}
		}
		if best != nil {
			out = append(out, *best)
		}
	}
	return out
}

// least is the smallest value on the axis.
const least = 1000

// panel draws the chart of a cell. most is the largest value in any panel.
func (c cell) panel(most float64) *plot.Plot {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%s, %d goroutines: takes/s (and × %s)", c.Title, c.Goroutines, baseline)
	p.Title.TextStyle.Font.Size = 13
	p.X.Scale = plot.LogScale{}
	p.X.Tick.Marker = plot.ConstantTicks{{Value: 1e3, Label: "1,000"}, {Value: 1e4, Label: "10,000"},
		{Value: 1e5, Label: "100,000"},
		{Value: 1e6, Label: "1,000,000"}, {Value: 1e7, Label: "10,000,000"}, {Value: 1e8, Label: "100,000,000"}}
	names := make([]string, len(c.Contenders))
	bars := make(bars, len(c.Contenders))
	for i, f := range c.Contenders {
		row := len(c.Contenders) - 1 - i // the first contender is on top
		names[row] = f.Name
		bars[row] = bar{value: f.Median.PerSecond, label: fmt.Sprintf("%s (%.3g×)", thousands(f.Median.PerSecond), f.Ratio),
			color: colorOf(f.Name)}
	}
	p.Add(bars)
	p.NominalY(names...)
	p.Y.Min, p.Y.Max = -0.5, float64(len(names))-0.5
	p.X.Min, p.X.Max = least, most*10 // room for a label
	p.Y.Padding = 0.9 * vg.Centimeter // the font of a viewer may be wider
	p.Y.Tick.Label.Font.Size = 11
	return p
}

func colorOf(name string) color.Color {
	of := func(list []contender) bool {
		for _, c := range list {
			if c.name == name {
				return true
			}
		}
		return false
	}
	switch {
	case of(ours()):
		return ourColor
	case of(libraries()):
		return otherColor
	}
	return floorColor
}

// thousands formats a number with commas, such as 12,345.
func thousands(v float64) string {
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// bar is one row of a chart.
type bar struct {
	value float64
	label string
	color color.Color
}

// bars are drawn from the left edge, because a logarithmic axis has no zero. Their labels are at their ends.
type bars []bar

// Plot implements plot.Plotter.
func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	const half = 0.36 // in units of the distance between two rows
	label := text.Style{Color: color.Black, Font: p.Y.Tick.Label.Font, Handler: p.TextHandler, YAlign: draw.YCenter}
	for i, bar := range b {
		value := max(bar.value, p.X.Min)
		low := y(float64(i) - half)
		high := y(float64(i) + half)
		end := x(value)
		c.FillPolygon(bar.color, []vg.Point{{X: c.Min.X, Y: low}, {X: end, Y: low}, {X: end, Y: high}, {X: c.Min.X, Y: high}})
		c.FillText(label, vg.Point{X: end + 4, Y: y(float64(i))}, bar.label)
	}
}

var _ plot.Plotter = bars(nil)
