package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// report has all measurements.
type report struct {
	Machine string    `json:"machine"`
	Date    time.Time `json:"date"`
	Rounds  int       `json:"rounds"`
	Time    string    `json:"time_per_run"`
	Cells   []cell    `json:"cells"`
}

// cell has the measurements of a workload with a number of goroutines.
type cell struct {
	Workload   string    `json:"workload"`
	Title      string    `json:"-"`
	Goroutines int       `json:"goroutines"`
	Contenders []figures `json:"contenders"`
}

// figures has the results of a contender in a cell.
type figures struct {
	Name        string   `json:"name"`
	Median      sample   `json:"median"`
	Ratio       float64  `json:"ratio"` // takes per second, compared with redis_rate
	BytesPerKey float64  `json:"bytes_per_key"`
	Samples     []sample `json:"rounds"` // one for each round
}

func newReport(ctx context.Context, s *server, o options) *report {
	version, err := s.info(ctx, "server", "redis_version")
	if err != nil {
		version = "unknown"
	}
	machine := fmt.Sprintf("%s, %d cores, %s/%s, %s, Redis %s, go-redis %s", processor(), runtime.NumCPU(), runtime.GOOS,
		runtime.GOARCH,
		runtime.Version(), version, moduleVersion("github.com/redis/go-redis/v9"))
	return &report{Machine: machine, Date: time.Now().UTC().Truncate(time.Second), Rounds: o.rounds, Time: o.time.String()}
}

// processor returns the name of the first processor, if the kernel reports it.
func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown processor"
}

func moduleVersion(path string) string {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == path {
			return m.Version
		}
	}
	return "unknown"
}

func (r *report) add(c cell) { r.Cells = append(r.Cells, c) }

// cell returns the measurements of a workload with a number of goroutines, or nil if there are none.
func (r *report) cell(workload string, goroutines int) *cell {
	for i, c := range r.Cells {
		if c.Workload == workload && c.Goroutines == goroutines {
			return &r.Cells[i]
		}
	}
	return nil
}

func (r *report) writeJSON(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// get returns the figures of a contender, or nil if there are none.
func (c *cell) get(name string) *figures {
	for i, f := range c.Contenders {
		if f.Name == name {
			return &c.Contenders[i]
		}
	}
	return nil
}

// ratio returns the median over the rounds of the ratio of value between two contenders. It reports false if one of
// them is missing.
func (c *cell) ratio(of, to string, value func(sample) float64) (float64, bool) {
	a, b := c.get(of), c.get(to)
	if a == nil || b == nil {
		return 0, false
	}
	var ratios []float64
	for i := range a.Samples {
		if divisor := value(b.Samples[i]); divisor > 0 {
			ratios = append(ratios, value(a.Samples[i])/divisor)
		}
	}
	return median(ratios), len(ratios) > 0
}

// of returns the median over the rounds of a contender's value. It reports false if the contender is missing.
func (c *cell) of(name string, value func(sample) float64) (float64, bool) {
	f := c.get(name)
	if f == nil {
		return 0, false
	}
	values := make([]float64, len(f.Samples))
	for i := range f.Samples {
		values[i] = value(f.Samples[i])
	}
	return median(values), len(values) > 0
}

// summarise computes medians and ratios.
func (c *cell) summarise() {
	for i := range c.Contenders {
		f := &c.Contenders[i]
		of := func(value func(*sample) *float64) {
			values := make([]float64, len(f.Samples))
			for j := range f.Samples {
				values[j] = *value(&f.Samples[j])
			}
			*value(&f.Median) = median(values)
		}
		of(func(s *sample) *float64 { return &s.PerSecond })
		of(func(s *sample) *float64 { return &s.P50 })
		of(func(s *sample) *float64 { return &s.P99 })
		of(func(s *sample) *float64 { return &s.ClientCPU })
		of(func(s *sample) *float64 { return &s.RedisCPU })
		of(func(s *sample) *float64 { return &s.Commands })
		of(func(s *sample) *float64 { return &s.Reads })
		of(func(s *sample) *float64 { return &s.ErrorShare })
		f.Ratio, _ = c.ratio(f.Name, baseline, perSecond)
	}
}

func perSecond(s sample) float64 { return s.PerSecond }
func p99(s sample) float64       { return s.P99 }
func redisCPU(s sample) float64  { return s.RedisCPU }
func inTrips(s sample) float64   { return s.P50 / 20_000 }

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

func (c *cell) print(w io.Writer) {
	if c.Workload == stalled.name {
		c.printShort(w)
		return
	}
	fmt.Fprintf(w, "\n%s, goroutines: %d\n", c.Title, c.Goroutines)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "contender\ttakes/s\t× "+baseline+"\tp50 µs\tp99 µs\tclient CPU s/M\tRedis CPU s/M\tcommands/take\tbytes/key\terrors\t")
	for _, f := range c.Contenders {
		m := f.Median
		fmt.Fprintf(t, "%s\t%.0f\t%.2f\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\t%.0f\t%.1f %%\t\n", f.Name, m.PerSecond, f.Ratio, m.P50,
			m.P99, m.ClientCPU,
			m.RedisCPU, m.Commands, f.BytesPerKey, 100*m.ErrorShare)
	}
	_ = t.Flush()
}
