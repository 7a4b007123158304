package pool

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// report is the content of rep/<region>: the state of the region's buckets. The region's next grants are based on it,
// and it acknowledges the terms that it shows in force.
type report struct {
	agent   string // the identity of the agent that wrote it
	tickets map[string]ticket
}

// kind is the kind of a bucket.
type kind int64

const (
	absent kind = iota // there is no bucket
	plain              // the bucket isn't a pool's
	pooled
	kinds
)

// ticket is the state of a region's bucket at an instant on the clock of its Redis. If the bucket couldn't be read, its
// ticket has no instant. Then it has only the usage, from which the next replica continues to count.
type ticket struct {
	now, era              int64 // µs
	before                int64 // the era that the agent read from its Redis before this one; 0 for none
	kind                  kind
	tokens, added, denied int64

	// terms are the terms in force. For a pool's bucket they have the fence, the capacity, the floor and the grant, even
	// if the grant has ended. For a plain bucket they have the capacity and the rate.
	terms policy.Terms
	usage // at the ticket's instant
}

// timed reports whether the ticket has an instant.
func (t ticket) timed() bool { return t.now > 0 }

// ticketOf returns the ticket to report for a bucket. t is the reply of the ticket script.
func ticketOf(t lua.Ticket) ticket {
	r := ticket{now: t.Now, era: t.Version.Era, tokens: t.Tokens, added: t.Added, denied: t.Denied}
	if t.Terms == nil {
		return r
	}
	p := *t.Terms
	switch {
	case p.Pool:
		r.kind = pooled
		r.terms = termsOf(p.GrantTokens, p.Tokens, p.Capacity, p.Per, 0)
		r.terms.Fence = p.Fence
		r.terms.GrantEnd = p.GrantEnd
		r.terms.GrantEra = p.GrantEra
	case p.Kind == policy.Stepped: // it has no rate, so it may use any number of tokens
		r.kind, r.terms = plain, policy.Terms{Capacity: p.Capacity, Tokens: policy.MaxTokens, Per: 1}
	default:
		r.kind, r.terms = plain, policy.Terms{Capacity: p.Capacity, Tokens: p.Tokens, Per: p.Per}
	}
	r.terms.Interval, r.terms.MaxElapsed = 0, 0 // not reported
	return r
}

// acknowledges reports whether the ticket shows these terms. If their grant has ended, the rate of the grant is no
// longer recorded, so it isn't compared.
func (t ticket) acknowledges(o policy.Terms) bool {
	o.Interval, o.MaxElapsed = 0, 0
	if o.GrantTokens == 0 {
		o.GrantTokens = t.terms.GrantTokens
	}
	return t.kind == pooled && t.terms == o
}

// rate returns the rate that was in force, in units, rounded down.
func (t ticket) rate(u unit) int64 {
	n := t.terms.Tokens
	if t.kind == pooled && t.terms.Granted(t.era, t.now) {
		n = t.terms.GrantTokens
	}
	return min(policy.MulDiv(n, u.micros, max(t.terms.Per, 1)), u.total)
}

const ticketNumbers = 17

// encode returns a line with the agent's identity, followed by a line for each pool.
func (r report) encode() string {
	b := append([]byte(format+" agent "), strings.ReplaceAll(r.agent, "\n", " ")...)
	b = append(b, '\n')
	var rows table
	for _, pool := range slices.Sorted(maps.Keys(r.tickets)) {
		t := r.tickets[pool]
		p := t.terms
		// Numbers that often differ from those of the line before come first. The last three are 0 for most buckets.
		b = rows.append(b, pool, t.tokens, t.added, t.denied, p.Fence.Seq, p.GrantTokens,
			t.now, p.GrantEnd-t.now, t.era, p.GrantEra-t.era, int64(t.kind), p.Fence.Epoch, p.Per, p.Capacity, p.Tokens,
			t.used-t.ahead-t.added+t.tokens, t.ahead, t.before)
	}
	return string(b)
}

func decodeReport(text string) (report, error) {
	agent, rest, err := lines(text, "agent")
	if err != nil {
		return report{}, fmt.Errorf("report: %w", err)
	}
	r := report{agent: agent, tickets: make(map[string]ticket, len(rest))}
	var rows table
	for _, line := range rest {
		pool, n, err := rows.parse(line, ticketNumbers)
		if err != nil {
			return report{}, fmt.Errorf("report: %w", err)
		}
		t := ticket{now: n[5], era: n[7], before: n[16], kind: kind(n[9]), tokens: n[0], added: n[1], denied: n[2],
			usage: usage{n[14] + n[15] + n[1] - n[0], n[15]}}
		t.terms = policy.Terms{
			Pool: t.kind == pooled, Fence: policy.Fence{Epoch: n[10], Seq: n[3]}, Per: n[11], Capacity: n[12], Tokens: n[13],
			GrantTokens: n[4], GrantEnd: n[6] + t.now, GrantEra: n[8] + t.era,
		}
		p := t.terms
		if t.kind < absent || t.kind >= kinds || p.Fence.Epoch > maxEpoch ||
			min(t.now, t.era, t.added, t.denied, p.Fence.Epoch, p.Fence.Seq, p.Per, p.Capacity, p.Tokens, p.GrantTokens,
				p.GrantEnd, p.GrantEra, t.used, t.ahead, t.before) < 0 {
			return report{}, fmt.Errorf("report: %w: %s has a number out of range", ErrRecord, pool)
		}
		r.tickets[pool] = t
	}
	return r, nil
}
