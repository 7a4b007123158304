package replica

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// publishEvery is the time between two checks whether the replica's templates are the published ones.
	publishEvery = time.Second
	// publishTimeout bounds a publication.
	publishTimeout = 2 * time.Second
	// published is the message if this replica's templates are the published ones.
	published = "templates are published"
)

// publishes publishes the templates of the configuration until ctx ends. It does so at the start, when the templates
// change, and when Redis has lost the published templates. Every replica does so, and the highest version wins. If the
// file has no field for templates, the published ones are those of the configuration.
func (r *Replica) publishes(ctx context.Context) error {
	ticker := time.NewTicker(publishEvery)
	defer ticker.Stop()
	lastMessage := ""
	for {
		lastMessage = r.publish(ctx, lastMessage)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-r.renewed:
		}
	}
}

// publish makes one attempt, and returns a message about its result. It logs the message unless it equals lastMessage.
func (r *Replica) publish(ctx context.Context, lastMessage string) string {
	calling, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	err := r.follow(calling)
	set := r.config().Templates
	if err == nil && set == nil {
		return ""
	}
	var answer lua.Publication
	if err == nil {
		answer, err = lua.PublishTemplates(calling, r.rdb, set)
	}
	if err == nil && answer.OK && (lastMessage != published || answer.Before != set.Version()) {
		// A replica that starts with the later file has no earlier templates, so it reads them. A running one may not have
		// had the file before this one.
		var earlier *policy.Templates
		earlier, err = lua.EarlierTemplates(calling, r.rdb)
		r.refiller.RecordTemplates(earlier)
	}
	if err == nil {
		r.mu.Lock()
		r.templatesConflict = !answer.OK && answer.Before == set.Version()
		r.templatesOutdated = 0
		if !answer.OK && answer.Before > set.Version() {
			r.templatesOutdated = answer.Before
		}
		r.mu.Unlock()
		if !answer.OK { // otherwise the file may be another deployment's, whose templates this replica follows
			r.refiller.RecordVersion(answer.Before)
		}
	}
	message, log := published, r.log.Info
	switch {
	case ctx.Err() != nil:
		return lastMessage
	case err != nil:
		message, log = "templates can't be published", r.log.Error
	case answer.OK && answer.Before == set.Version() && lastMessage != "":
		return message
	case !answer.OK && answer.Before > set.Version():
		log = r.log.Warn
		message = "templates of a later version are published: this replica's config is old, or another deployment uses " +
			"this Redis database"
	case !answer.OK:
		log = r.log.Warn
		message = "other templates are published under this version and stay: raise the config's version, unless another " +
			"deployment uses this Redis database"
	}
	if message != lastMessage || answer.OK {
		fields := []any{"version", set.Version(), "templates", len(set.All()), "before", answer.Before}
		if err != nil {
			fields = append(fields, "error", err)
		}
		log(message, fields...)
	}
	return message
}

// follow puts the published templates in force if the file has no field for templates. If a template matches a bucket
// of the file, the bucket keeps its own policy. So a set that doesn't name the bucket is replaced by one that does,
// under the file's version. Names that the file doesn't have stay in the set, because they may be another deployment's.
func (r *Replica) follow(ctx context.Context) error {
	if !r.follows() {
		return nil
	}
	published, id, err := lua.ReadTemplates(ctx, r.rdb, r.publishedID)
	if err != nil {
		return err
	}
	r.reloading.Lock()
	defer r.reloading.Unlock()
	if !r.follows() {
		return nil
	}
	cfg := r.config()
	set := cfg.Templates
	if published != nil && (set == nil || published.Version() >= set.Version()) {
		set = published
	}
	set, err = set.Except(cfg.Version, cfg.Names())
	if err != nil {
		return err
	}
	r.publishedID = id
	if set == cfg.Templates {
		return nil
	}
	if err := r.refiller.Update(buckets(cfg), set, cfg.Version); err != nil {
		return err
	}
	cfg.Templates = set
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg = cfg
	return nil
}

// follows reports whether the file in force has no field for templates.
func (r *Replica) follows() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.noTemplates
}
