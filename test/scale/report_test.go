package scale

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
)

// figures are the results of one scenario.
type figures struct {
	scenario
	RefillsPerSecond float64 `json:"refills_per_second"`
	PerRedisSecond   float64 `json:"refills_per_redis_cpu_second"`
	RedisCores       float64 `json:"redis_cores"`
	RefillerCores    float64 `json:"refiller_cores"` // of all replicas together
	CPUPerMillion    float64 `json:"refiller_cpu_seconds_per_million_refills"`
	MemoryMB         float64 `json:"refiller_memory_mb"` // of the largest replica
	LagP50           float64 `json:"lag_p50_seconds"`    // time beyond one interval
	LagP99           float64 `json:"lag_p99_seconds"`
	BytesPerBucket   float64 `json:"redis_bytes_per_bucket"`
	Startup          float64 `json:"startup_seconds"`
	Commands         float64 `json:"redis_commands_per_second_per_replica"` // including commands in scripts
	TakeAlone        float64 `json:"take_p99_ms_without_refills"`
	TakeBeside       float64 `json:"take_p99_ms_beside_refills"`

	running []*replica
}

// writeTable writes the figures as a table.
func writeTable(w io.Writer, list []figures) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "keys\tactive\tkind\tstore\treplicas\tinterval\trefills/s\tper Redis CPU-s\tRedis cores\trefiller cores\tCPU-s/million\tMB\tlag p50\tlag p99\tbytes/bucket\tstart-up\tcommands/s\ttake p99\tbeside\t")
	for _, f := range list {
		kind, store := "template", "single"
		if f.Configured {
			kind = "configured"
		}
		if f.Cluster {
			store = "cluster"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%.0f\t%.0f\t%.3f\t%.3f\t%.2f\t%.0f\t%.0f ms\t%.0f ms\t%.0f\t%.1f s\t%.1f\t%.2f ms\t%.2f ms\t\n",
			thousands(f.Keys), thousands(f.Active), kind, store, f.Replicas, f.Interval, f.RefillsPerSecond, f.PerRedisSecond,
			f.RedisCores, f.RefillerCores,
			f.CPUPerMillion, f.MemoryMB, 1000*f.LagP50, 1000*f.LagP99, f.BytesPerBucket, f.Startup, f.Commands, f.TakeAlone,
			f.TakeBeside)
	}
	return t.Flush()
}

// writeJSON writes the figures to a file, as JSON.
func writeJSON(path string, list []figures) error {
	b, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644) //nolint:gosec // for everybody to read
}
