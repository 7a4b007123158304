package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/net/http/httpguts"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/filewatch"
	"github.com/tokenrefill/refiller/internal/sidecar"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
)

// limitFiles are the files that the sidecar watches.
type limitFiles struct {
	envoy   []string // files of rate limits for Envoy
	named   []string // files of limits by name, at most one
	shadow  bool
	quota   bool
	headers bool
	names   envoy.HeaderNames
}

// inForce has the limits that the files contain.
type inForce struct {
	envoy *envoy.Limits // nil if there are no such files
	named *limits.Set   // nil if there is no such file
}

func (f *limitFiles) paths() []string { return slices.Concat(f.envoy, f.named) }

func (f *limitFiles) validate() error {
	if len(f.envoy) == 0 && (f.shadow || f.quota || f.headers) {
		return cli.Usage(errors.New("--envoy-shadow, --envoy-quota and --envoy-headers need --envoy"))
	}
	for flag, name := range map[string]string{
		"--envoy-limit-header": f.names.Limit, "--envoy-remaining-header": f.names.Remaining,
		"--envoy-reset-header": f.names.Reset,
	} {
		if !httpguts.ValidHeaderFieldName(name) {
			return cli.Usage(fmt.Errorf("%s %q: want a header name, such as X-RateLimit-Limit", flag, name))
		}
	}
	if len(f.named) > 1 {
		return cli.Usage(fmt.Errorf("--limits: %d files; want one", len(f.named)))
	}
	return nil
}

// load reads the files again.
func (f *limitFiles) load(rdb redis.UniversalClient, client *fetch.Client, w *envoy.Windows) (inForce, error) {
	var now inForce
	if len(f.envoy) > 0 {
		files := make(map[string][]byte)
		for _, path := range f.envoy {
			if err := readAll(path, files); err != nil {
				return now, fmt.Errorf("--envoy: %w", err)
			}
		}
		var err error
		now.envoy, err = envoy.Parse(files, w)
		if err != nil {
			return now, cli.Usage(err)
		}
		now.envoy.Shadow = f.shadow
		now.envoy.Quota = f.quota
		if f.headers {
			now.envoy.Headers = &f.names
		}
	}
	for _, path := range f.named {
		data, err := os.ReadFile(path)
		if err != nil {
			return now, fmt.Errorf("--limits: %w", err)
		}
		now.named, err = limits.Parse(path, data, rdb, client)
		if err != nil {
			return now, cli.Usage(err)
		}
	}
	return now, nil
}

// readAll reads a file, or the YAML files of a directory, into files.
func readAll(path string, files map[string][]byte) error {
	paths, err := filewatch.Files(path)
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		return fmt.Errorf("%s has no file whose name ends in .yaml or .yml", path)
	}
	for _, file := range paths {
		files[file], err = os.ReadFile(file)
		if err != nil {
			return err
		}
	}
	return nil
}

// follower puts the files in force again when they change, and at SIGHUP.
type follower struct {
	*filewatch.Reload
	ok prometheus.Gauge // 1 unless the last change was refused
}

// follow begins to watch the files. It must be called before they are first read. Otherwise a change between the two
// would be missed. The follower must be run or closed.
func (f *limitFiles) follow(log hclog.Logger) (*follower, error) {
	w := &follower{Reload: filewatch.NewReload(),
		ok: prometheus.NewGauge(prometheus.GaugeOpts{Name: "refiller_sidecar_limits_last_reload_ok",
			Help: "1 if the present files of limits are in use, 0 if their content was refused or a file was deleted."})}
	w.ok.Set(1)
	for i, path := range f.paths() {
		if err := w.Watch(path, filewatch.Options{Logger: log, Gone: true}); err != nil {
			_ = w.Close() // no file has been read yet
			flag := "--envoy"
			if i >= len(f.envoy) {
				flag = "--limits"
			}
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
	}
	return w, nil
}

// run calls load after each change of the files, and then use, until ctx ends. If a file is wrong, the limits in force
// don't change.
func (w *follower) run(ctx context.Context, load func() (inForce, error), use func(inForce), log hclog.Logger) {
	w.Run(ctx, func(cause string) {
		now, err := load()
		if err != nil {
			w.ok.Set(0)
			log.Error("limits not changed: the files are wrong", "cause", cause, "error", err)
			return
		}
		use(now)
		w.ok.Set(1)
		log.Info("limits loaded", "cause", cause, "files", w.Files())
	})
}

// use puts limits in force in a running server.
func use(server *sidecar.Server, now inForce) {
	if now.envoy != nil {
		server.UseEnvoy(now.envoy)
	}
	if now.named != nil {
		server.UseLimits(now.named)
	}
}
