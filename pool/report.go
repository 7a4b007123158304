package pool

import (
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/tokenrefill/refiller/lua"
)

// report is what rep/<region> holds: for each pool the ticket that the region's
// next grant is founded on. Its fence acknowledges that no older grant is in
// force.
type report struct {
	agent   string // who wrote it
	tickets map[string]lua.Ticket
}

// encode writes a line with the agent's identity, then a line for each pool:
// its name and the ticket's numbers.
func (r report) encode() string {
	pools := make([]string, 0, len(r.tickets))
	for p := range r.tickets {
		pools = append(pools, p)
	}
	sort.Strings(pools)
	var b strings.Builder
	b.WriteString("agent ")
	b.WriteString(strings.ReplaceAll(r.agent, "\n", " "))
	b.WriteByte('\n')
	for _, p := range pools {
		t := r.tickets[p]
		b.WriteString(p)
		for _, n := range ticketFields(&t) {
			b.WriteByte(' ')
			b.WriteString(strconv.FormatInt(*n, 10))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// ticketNumbers is how many numbers a ticket has.
const ticketNumbers = 8

// ticketFields lists the numbers of a ticket in the order of their encoding.
func ticketFields(t *lua.Ticket) [ticketNumbers]*int64 {
	return [...]*int64{&t.Now, &t.Version.Era, &t.Version.Index, &t.Fence.Epoch, &t.Fence.Seq, &t.Tokens, &t.Added, &t.Denied}
}

func decodeReport(text string) (report, error) {
	lines := strings.Count(text, "\n")
	first, rest, _ := strings.Cut(text, "\n")
	agent, ok := strings.CutPrefix(first, "agent ")
	if text != "" && !ok {
		return report{}, fmt.Errorf("%w: report: line 1 is %q, want an agent", ErrRecord, first)
	}
	r := report{agent: agent, tickets: make(map[string]lua.Ticket, lines)}
	for n := 2; rest != ""; n++ {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		pool, numbers, _ := strings.Cut(line, " ")
		var t lua.Ticket
		for i, field := range ticketFields(&t) {
			word, more, found := strings.Cut(numbers, " ")
			v, err := strconv.ParseInt(word, 10, 64)
			if err != nil || found != (i < ticketNumbers-1) {
				return report{}, fmt.Errorf("%w: report: line %d: number %d is %q, want %d numbers", ErrRecord, n, i+1, word, ticketNumbers)
			}
			*field, numbers = v, more
		}
		r.tickets[pool] = t
	}
	return r, nil
}
