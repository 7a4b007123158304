package replica

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/refill"
)

// Results of a reload.
const (
	reloadApplied   = "applied"   // the new configuration is in force
	reloadUnchanged = "unchanged" // it equals the configuration in force
	reloadRefused   = "refused"   // the old one stays in force
)

// reloads reads the configuration again at each request, until ctx ends.
func (r *Replica) reloads(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case cause := <-r.asked:
			next, err := r.load()
			if err != nil {
				r.refuse(cause, err)
				continue
			}
			_ = r.Reload(next, cause) // a refusal has been reported
		}
	}
}

// Reload puts a configuration in force, as far as a running replica can: buckets, templates, policies, pools, version
// and log level. Other differences take effect at the next start, and Reload reports them. A configuration that can't
// replace the one in force, for example because its version is lower, is refused. Reload then reports and returns the
// error, and changes nothing. Refills under the new policies begin at once. A reload adds no tokens. cause names the
// reason of the reload in messages.
func (r *Replica) Reload(next config.Config, cause string) error {
	r.reloading.Lock()
	defer r.reloading.Unlock()
	old := r.config()
	change, err := old.To(next)
	templates := next.Templates
	if templates == nil { // next has no field for templates, so follow puts the published ones in force
		templates = old.Templates
	}
	if err == nil && change.Applies() {
		err = r.updatePools(next)
		if err == nil {
			err = r.refiller.Update(buckets(r.pooledAs(next)), templates, next.Version)
		}
	}
	if err != nil {
		r.refuse(cause, err)
		return err
	}
	// Options that only a start can change stay as they are.
	inForce := next
	inForce.Region = old.Region
	inForce.Redis = old.Redis
	inForce.Election = old.Election
	inForce.Listen = old.Listen
	inForce.PoolRegistry, inForce.Log.JSON = old.PoolRegistry, old.Log.JSON
	inForce.Templates = templates
	inForce.Pools = r.pooledAs(next).Pools
	if !next.Pooled() {
		inForce.PoolsVersion = old.PoolsVersion
	}
	if old.Election.Mode == config.ModeEtcd {
		inForce.RefillInterval = old.RefillInterval
	}
	if change.Level {
		r.log.SetLevel(hclog.LevelFromString(next.Log.Level))
	}

	report := admin.Reload{At: time.Now(), Cause: cause, Result: reloadApplied, Restart: change.Restart}
	if !change.Applies() {
		report.Result = reloadUnchanged
	}
	r.mu.Lock()
	r.cfg = inForce
	r.noTemplates = next.Templates == nil
	r.mu.Unlock()
	timing.Signal(r.renewed)
	r.report(report)
	r.stats.Configure(buckets(inForce))
	r.log.Info("config reloaded", "cause", cause, "result", report.Result, "version", next.Version,
		"added", len(change.Added), "removed", len(change.Removed), "changed", len(change.Changed), "pools-changed",
		change.Pools, "templates-changed", change.Templates,
		"log-level", next.Log.Level)
	if old.Templates != nil && next.Templates == nil {
		r.log.Warn("the field templates is missing, so the published ones stay in force; to end them, write templates: []")
	}
	if len(change.Restart) > 0 {
		r.log.Warn("config has changes that need a restart", "fields", change.Restart)
	}
	return nil
}

// refuse reports a configuration that is not put in force.
func (r *Replica) refuse(cause string, err error) {
	problems := []string{err.Error()}
	var each config.Problems
	if errors.As(err, &each) {
		problems = problems[:0]
		for _, p := range each {
			problems = append(problems, p.String())
		}
	}
	r.mu.Lock()
	restart := r.lastReload.Restart
	version := r.cfg.Version
	r.mu.Unlock()
	r.report(admin.Reload{At: time.Now(), Cause: cause, Result: reloadRefused, Problems: problems, Restart: restart})
	r.log.Error("config refused: the old one stays in force", "cause", cause, "version", version, "problems", problems)
}

// report stores the result for /status and the metrics.
func (r *Replica) report(report admin.Reload) {
	r.mu.Lock()
	defer r.mu.Unlock()
	report.Applied = r.lastReload.Applied
	report.Unchanged = r.lastReload.Unchanged
	report.Refused = r.lastReload.Refused
	switch report.Result {
	case reloadApplied:
		report.Applied++
	case reloadUnchanged:
		report.Unchanged++
	case reloadRefused:
		report.Refused++
	}
	r.lastReload = report
}

// config returns the configuration in force.
func (r *Replica) config() config.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cfg
}

// buckets returns the configuration's buckets for the refill loop.
func buckets(cfg config.Config) []refill.Bucket {
	list := make([]refill.Bucket, len(cfg.Buckets))
	for i, b := range cfg.Buckets {
		list[i] = refill.Bucket{Key: b.Key, Policy: b.Policy}
	}
	return append(list, pooled(cfg)...)
}
