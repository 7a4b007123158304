package doctor

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// Buckets checks whether the user has the rights for these buckets, and whether the keys really hold buckets. It writes
// nothing.
func Buckets(ctx context.Context, rdb redis.UniversalClient, keys []string) Finding {
	f := Finding{Check: "your buckets", Level: OK,
		Detail: fmt.Sprintf("the user may access the keys of each bucket (%d checked)", len(keys))}
	wrong := 0
	for i, ticket := range lua.Tickets(ctx, rdb, keys) {
		if ticket.Err == nil || errors.Is(ticket.Err, lua.ErrUnknownBucket) {
			continue
		}
		wrong++
		if wrong > 1 {
			continue
		}
		f.Level, f.Detail = Failure, fmt.Sprintf("%q: %v", keys[i], ticket.Err)
		switch {
		case redis.HasErrorPrefix(ticket.Err, "NOPERM"):
			f.Advice = "allow the user every key (~*), or for each bucket K the keys K, {K} and {K}:… (~K ~{K}*)"
		case errors.Is(ticket.Err, lua.ErrMalformedBucket):
			f.Advice = "another program uses this key: rename the bucket, or delete the key"
		}
	}
	if wrong > 1 {
		f.Detail += fmt.Sprintf(", and %d more", wrong-1)
	}
	return f
}
