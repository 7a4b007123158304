package lua

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// Ticket is where a pool's bucket stood at an instant of its server's clock.
type Ticket struct {
	Now     int64          // Unix µs on the server's clock
	Version policy.Version // zero if the bucket has no state
	Terms   *policy.Terms  // in force; nil if the bucket has no state
	Fence   policy.Fence   // of the terms in force, if they are a pool's
	Tokens  int64
	// Added and Denied count the tokens that refills added and that takes were
	// denied while the bucket was a pool's; Denied also in shadow mode. They only grow within an era.
	Added, Denied int64
}

// TicketResult is the ticket of one bucket of several, or an error of its own.
type TicketResult struct {
	Ticket
	Err error
}

// Tickets reads the tickets of pools' buckets in one round trip. It writes
// nothing. The results are in the order of the keys.
func Tickets(ctx context.Context, rdb redis.UniversalClient, keys []string) []TicketResult {
	results := make([]TicketResult, len(keys))
	for i, raw := range ticketScript.pipelined(ctx, rdb, len(keys), func(i int) ([]string, []any) { return bucketKeys(keys[i]), nil }) {
		if raw.err != nil {
			results[i].Err = raw.err
			continue
		}
		results[i].Ticket, results[i].Err = decodeTicket(raw.value, keys[i])
	}
	return results
}

func decodeTicket(v any, key string) (Ticket, error) {
	r, _, err := open(v, key, codeDone)
	if err != nil {
		return Ticket{}, err
	}
	t := Ticket{
		Now: r.int(), Version: policy.Version{Era: r.int(), Index: r.int()},
		Tokens: r.int(), Added: r.count(), Denied: r.count(), Terms: r.terms(),
	}
	if t.Terms != nil && t.Terms.Pool {
		t.Fence = t.Terms.Fence
	}
	return t, r.end()
}

// count reads a counter, which may be beyond what Lua's numbers hold exactly.
func (r *reply) count() int64 {
	if r.err != nil {
		return 0
	}
	if len(r.values) == 0 {
		r.err = fmt.Errorf("%w: too short", ErrBadReply)
		return 0
	}
	text, ok := r.values[0].(string)
	r.values = r.values[1:]
	n, err := strconv.ParseInt(text, 10, 64)
	if !ok || err != nil {
		r.err = fmt.Errorf("%w: %q for a count", ErrBadReply, text)
	}
	return n
}
