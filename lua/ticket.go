package lua

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// ticketsPerCall is the most tickets that one script call reads. More would block the server for long.
const ticketsPerCall = 100

// Ticket is the state of a pool's bucket at an instant of its server's clock.
type Ticket struct {
	Now     int64          // Unix µs on the server's clock
	Version policy.Version // zero if the bucket has no state
	Terms   *policy.Terms  // in force; nil if the bucket has no state
	Fence   policy.Fence   // of the terms in force, if they are a pool's
	Tokens  int64
	// Added counts the tokens that refills added while the bucket was a pool's. Denied counts the tokens that takes were
	// denied while the bucket was a pool's or in shadow mode. Both only grow within an era.
	Added, Denied int64
}

// TicketResult is the ticket of one of several buckets, or the error of reading it.
type TicketResult struct {
	Ticket
	Err error
}

// Tickets reads the tickets of pools' buckets in one round trip. If the server refuses a script call, perhaps because
// of only one of the buckets, Tickets reads the tickets of that call one by one, in a second round trip. Tickets writes
// nothing. The results are in the order of the keys.
func Tickets(ctx context.Context, rdb redis.UniversalClient, keys []string) []TicketResult {
	return EachAlone(keys, ticketsPerCall, func(keys []string, perCall int) []TicketResult {
		return readTickets(ctx, rdb, keys, perCall)
	}, func(r *TicketResult) error { return r.Err })
}

// readTickets reads tickets, at most perCall of them in each script call.
func readTickets(ctx context.Context, rdb redis.UniversalClient, keys []string, perCall int) []TicketResult {
	results := make([]TicketResult, len(keys))
	spans := spansOf(rdb, len(keys), perCall, func(i int) string { return keys[i] })
	cmds, errs := ticketScript.pipelined(ctx, rdb, len(spans), func(i int) ([]string, []any) {
		asked := keys[spans[i].from:spans[i].to]
		names := make([]string, 2*len(asked))
		for k, key := range asked {
			names[k], names[len(asked)+k] = TokensKey(key), ControlKey(key)
		}
		return names, nil
	})
	for i, span := range spans {
		decodeTickets(cmds[i].Val(), errs[i], keys[span.from:span.to], results[span.from:span.to])
	}
	return results
}

// decodeTickets reads the reply of one script call.
func decodeTickets(v any, err error, keys []string, results []TicketResult) {
	values, _ := v.([]any)
	now := int64(0)
	if err == nil && len(values) != 1+len(keys) {
		err = fmt.Errorf("%w: %d values for %d tickets", ErrBadReply, len(values), len(keys))
	}
	if err == nil {
		r := Reply{values: values[:1]}
		now, err = r.Int(), r.err
	}
	for i, key := range keys {
		results[i].Err = err
		if err == nil {
			results[i].Ticket, results[i].Err = decodeTicket(now, values[1+i], key)
		}
	}
}

func decodeTicket(now int64, v any, key string) (Ticket, error) {
	r, _, err := open(v, []string{TokensKey(key), ControlKey(key)}, codeDone)
	if err != nil {
		return Ticket{}, err
	}
	t := Ticket{
		Now: now, Version: policy.Version{Era: r.Int(), Index: r.Int()},
		Tokens: r.Int(), Added: r.count(), Denied: r.count(), Terms: r.terms(),
	}
	if t.Terms != nil && t.Terms.Pool {
		t.Fence = t.Terms.Fence
	}
	return t, r.End()
}
