// Command scalechart draws what it costs to keep active buckets full, from the figures
// that the suite in test/scale has written: scalechart FIGURES.json CHART.svg.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"os"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// figure is the part of a measurement that is drawn.
type figure struct {
	Configured    bool    `json:"configured"`
	Keys          int     `json:"keys"`
	Active        int     `json:"active_buckets"`
	Cluster       bool    `json:"cluster"`
	Replicas      int     `json:"replicas"`
	Interval      int64   `json:"interval_ns"`
	RedisCores    float64 `json:"redis_cores"`
	RefillerCores float64 `json:"refiller_cores"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "scalechart:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return errors.New("want two arguments: the file of figures, and that of the chart")
	}
	b, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var figures []figure
	if err := json.Unmarshal(b, &figures); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	p, err := chart(figures)
	if err != nil {
		return err
	}
	return p.Save(24*vg.Centimeter, 14*vg.Centimeter, args[1])
}

// chart draws two lines for every store and number of buckets of templates: processors
// of Redis, and of the refillers, against active buckets, for one replica. Measurements
// with longer intervals than a second count as if they had fewer active buckets.
func chart(figures []figure) (*plot.Plot, error) {
	lines := map[string]plotter.XYs{}
	for _, f := range figures {
		if f.Configured || f.Replicas != 1 {
			continue
		}
		store := "one Redis"
		if f.Cluster {
			store = "Cluster"
		}
		x := float64(f.Active) * 1e9 / float64(f.Interval)
		of := fmt.Sprintf("%s, %d buckets: ", store, f.Keys)
		lines[of+"Redis"] = append(lines[of+"Redis"], plotter.XY{X: x, Y: f.RedisCores})
		lines[of+"refiller"] = append(lines[of+"refiller"], plotter.XY{X: x, Y: f.RefillerCores})
	}
	if len(lines) == 0 {
		return nil, errors.New("no figures of a template with one replica")
	}
	names := make([]string, 0, len(lines))
	for name := range lines {
		names = append(names, name)
	}
	slices.Sort(names)
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text = "Cost of active buckets, refilled once a second"
	p.X.Label.Text, p.Y.Label.Text = "buckets that are not full", "processors"
	p.X.Min, p.Y.Min = 0, 0
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(plotter.NewGrid())
	for i, name := range names {
		points := lines[name]
		slices.SortFunc(points, func(a, b plotter.XY) int {
			switch {
			case a.X < b.X:
				return -1
			case a.X > b.X:
				return 1
			}
			return 0
		})
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, marks.Color, marks.Shape = plotutil.Color(i), plotutil.Color(i), draw.CircleGlyph{}
		p.Add(line, marks)
		p.Legend.Add(name, line, marks)
	}
	return p, nil
}
