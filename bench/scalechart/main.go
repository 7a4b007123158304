// Command scalechart draws a chart of the cost of refilling active buckets. It reads the figures that test/scale has
// written:
//
//	scalechart FIGURES.json CHART.svg
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"maps"
	"os"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// figure has the fields of a measurement that the chart uses.
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

// chart draws two lines for every kind of store and number of buckets. One line shows how many processors Redis uses,
// and the other how many the refiller uses. The x axis has the number of active buckets, divided by their refill
// interval in seconds. chart uses only measurements of a template's buckets that were made with one replica.
func chart(figures []figure) (*plot.Plot, error) {
	lines := map[series]plotter.XYs{}
	for _, f := range figures {
		if f.Configured || f.Replicas != 1 {
			continue
		}
		x := float64(f.Active) * 1e9 / float64(f.Interval)
		redis, refiller := series{f.Cluster, f.Keys, "Redis"}, series{f.Cluster, f.Keys, "refiller"}
		lines[redis] = append(lines[redis], plotter.XY{X: x, Y: f.RedisCores})
		lines[refiller] = append(lines[refiller], plotter.XY{X: x, Y: f.RefillerCores})
	}
	if len(lines) == 0 {
		return nil, errors.New("no figures of a template that were measured with one replica")
	}
	all := slices.SortedFunc(maps.Keys(lines), func(a, b series) int {
		return cmp.Or(cmp.Compare(a.of, b.of), cmp.Compare(a.store(), b.store()), cmp.Compare(a.buckets, b.buckets))
	})
	p := plot.New()
	p.BackgroundColor = color.White
	p.Title.Text = "Cost of active buckets, refilled once a second"
	p.X.Label.Text, p.Y.Label.Text = "buckets that are not full", "processors"
	p.X.Min, p.Y.Min = 0, 0
	p.X.Tick.Marker = separated{}
	p.Legend.Top = true
	p.Legend.Left = true
	p.Legend.Padding = vg.Millimeter
	p.Add(plotter.NewGrid())
	for i, s := range all {
		points := lines[s]
		slices.SortFunc(points, func(a, b plotter.XY) int { return cmp.Compare(a.X, b.X) })
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color = plotutil.Color(i)
		marks.Color = plotutil.Color(i)
		marks.Shape = draw.CircleGlyph{}
		p.Add(line, marks)
		p.Legend.Add(s.String(), line, marks)
	}
	p.X.Max *= 1.06 // room for the label of the last tick, which is centred on the tick
	p.Y.Max *= 1.06
	return p, nil
}

// series identifies a line of the chart. The field of names the program that the line is about, Redis or refiller. The
// field buckets counts all buckets, active or not.
type series struct {
	cluster bool
	buckets int
	of      string
}

func (s series) store() string {
	if s.cluster {
		return "Cluster"
	}
	return "single server"
}

func (s series) String() string {
	return fmt.Sprintf("%s, %s, %s buckets", s.of, s.store(), thousands(s.buckets))
}

// separated makes the usual marks of an axis, with commas in large numbers.
type separated struct{}

func (separated) Ticks(least, most float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(least, most)
	for i := range ticks {
		if !ticks[i].IsMinor() {
			ticks[i].Label = thousands(int(ticks[i].Value))
		}
	}
	return ticks
}

func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
