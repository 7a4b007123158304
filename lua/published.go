package lua

import (
	"context"
	"crypto/sha1" //nolint:gosec // It identifies sets; a collision helps no attacker.
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// TemplatesKey is the key of the set of templates that refillers publish and consumers read. It can't be the key of a
// bucket.
const TemplatesKey = "{refiller:templates}:set"

// Publication is the result of PublishTemplates.
type Publication struct {
	OK     bool  // the set is now the published one
	Before int64 // version of the set that was published before the call, -1 for none; if not OK, that set stays
}

// PublishTemplates publishes a set of templates in place of the published one. It changes nothing if the published set
// has a later version, or has the same version and other templates. It may be repeated: if the set is already the
// published one, that costs one read.
func PublishTemplates(ctx context.Context, c Client, set *policy.Templates) (Publication, error) {
	text := set.Encode()
	id := templatesID(text)
	if there, err := hget(ctx, c, TemplatesKey, "id"); err != nil {
		return Publication{}, fmt.Errorf("refiller: publish: %w", err)
	} else if there == id {
		return Publication{OK: true, Before: set.Version()}, nil
	}
	r, code, err := publishScript.ask(ctx, c, []string{TemplatesKey}, []any{set.Version(), id, text}, codeDenied, codeDone)
	if err != nil {
		return Publication{}, err
	}
	p := Publication{OK: code == codeDone, Before: r.Int()}
	return p, r.End()
}

// ReadTemplates reads the published set of templates and its id. known is the id of the set that the caller has, or
// empty. The set is nil if none is published, or if the published one has the id known.
func ReadTemplates(ctx context.Context, c Client, known string) (set *policy.Templates, id string, err error) {
	if known != "" { // otherwise the text is needed anyway, and a first take waits for one round trip less
		id, err = hget(ctx, c, TemplatesKey, "id")
		if err != nil {
			return nil, "", fmt.Errorf("refiller: templates: %w", err)
		}
		if id == "" || id == known {
			return nil, id, nil
		}
	}
	text, err := hget(ctx, c, TemplatesKey, "text")
	if err != nil {
		return nil, "", fmt.Errorf("refiller: templates: %w", err)
	}
	if text == "" {
		return nil, "", nil
	}
	set, err = policy.DecodeTemplates(text)
	if err != nil {
		return nil, "", err
	}
	return set, templatesID(text), nil
}

// EarlierTemplates reads the set of templates that the published set replaced. It returns nil if there was none, or if
// it can't be decoded.
func EarlierTemplates(ctx context.Context, c Client) (*policy.Templates, error) {
	text, err := hget(ctx, c, TemplatesKey, "earlier")
	if err != nil {
		return nil, fmt.Errorf("refiller: templates: %w", err)
	}
	set, _ := policy.DecodeTemplates(text) // another release may have written it
	return set, nil
}

func templatesID(text string) string {
	sum := sha1.Sum([]byte(text)) //nolint:gosec // as above
	return hex.EncodeToString(sum[:])
}

// hget reads a field of a hash; "" if it is missing.
func hget(ctx context.Context, c Client, key, field string) (string, error) {
	cmd := redis.NewStringCmd(ctx, "hget", key, field)
	err := c.Process(ctx, cmd)
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	if redis.HasErrorPrefix(err, "WRONGTYPE") {
		return "", malformedKey(key)
	}
	if err != nil { // cmd is not read: the client may still be writing to it
		return "", err
	}
	return cmd.Val(), nil
}
