package pool

import (
	"bufio"
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

// ticketFields lists the numbers of a ticket in the order of their encoding.
func ticketFields(t *lua.Ticket) []*int64 {
	return []*int64{&t.Now, &t.Version.Era, &t.Version.Index, &t.Fence.Epoch, &t.Fence.Seq, &t.Tokens, &t.Added, &t.Denied}
}

func decodeReport(text string) (report, error) {
	r := report{tickets: map[string]lua.Ticket{}}
	lines := bufio.NewScanner(strings.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		if n == 1 {
			if word != "agent" {
				return report{}, fmt.Errorf("%w: report: line 1 is %q, want an agent", ErrRecord, lines.Text())
			}
			r.agent = rest
			continue
		}
		var t lua.Ticket
		fields, words := ticketFields(&t), strings.Fields(rest)
		if len(words) != len(fields) {
			return report{}, fmt.Errorf("%w: report: line %d has %d numbers, want %d", ErrRecord, n, len(words), len(fields))
		}
		for i, f := range fields {
			v, err := strconv.ParseInt(words[i], 10, 64)
			if err != nil {
				return report{}, fmt.Errorf("%w: report: line %d: %w", ErrRecord, n, err)
			}
			*f = v
		}
		r.tickets[word] = t
	}
	if err := lines.Err(); err != nil {
		return report{}, fmt.Errorf("%w: report: %w", ErrRecord, err)
	}
	return r, nil
}
