// Command chart packages the chart with a version, as "helm package" does:
//
//	go -C deploy run ./cmd/chart -version 0.1.0 -o ../dist
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"os"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/chart/v2/util"
)

func main() {
	dir := flag.String("chart", "helm/refiller", "the directory of the chart")
	version := flag.String("version", "", "the version, without a v; that of the chart if it is empty")
	out := flag.String("o", "../dist", "where to write the package")
	flag.Parse()
	slog.SetLogLoggerLevel(slog.LevelWarn) // otherwise Helm logs each symbolic link
	if err := save(*dir, *version, *out); err != nil {
		fmt.Fprintln(os.Stderr, "chart:", err)
		os.Exit(1)
	}
}

func save(dir, version, out string) error {
	chart, err := loader.Load(dir)
	if err != nil {
		return err
	}
	if version != "" {
		chart.Metadata.Version, chart.Metadata.AppVersion = version, "v"+version
	}
	path, err := util.Save(chart, out)
	if err != nil {
		return err
	}
	fmt.Println(path)
	return nil
}
