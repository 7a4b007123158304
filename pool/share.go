package pool

import (
	"bufio"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// ErrRecord is returned for content of a key that can't be read.
var ErrRecord = errors.New("pool: bad record")

// share is what share/<region> holds: for each pool the terms that may be in
// force in the region, the newest first. Those after it are older ones that the
// region has not acknowledged away; they count against the pool until it has,
// or until they have ended.
type share struct {
	lease time.Duration // the longest of the grants, for whoever has to wait for their end
	terms map[string][]policy.Terms
	// demand of each pool, as the coordinator sees it, in tokens per Per of its
	// newest terms; for people to read.
	demand map[string]int64
}

func newShare(lease time.Duration) share {
	return share{lease: lease, terms: map[string][]policy.Terms{}, demand: map[string]int64{}}
}

// lineBytes is about what a line takes.
const lineBytes = 192

// encode writes a line with the lease in microseconds, then a line for each
// terms: the pool's name, its demand, and policy.Terms as the scripts store
// them, with a space between.
func (s share) encode() string {
	pools := make([]string, 0, len(s.terms))
	for p := range s.terms {
		pools = append(pools, p)
	}
	sort.Strings(pools)
	b := appendLease(make([]byte, 0, 64+lineBytes*len(pools)), s.lease)
	for _, p := range pools {
		b = appendLines(b, p, s.demand[p], s.terms[p])
	}
	return string(b)
}

// appendLease appends the first line of a share.
func appendLease(b []byte, lease time.Duration) []byte {
	return append(strconv.AppendInt(append(b, "lease "...), lease.Microseconds(), 10), '\n')
}

// appendLines appends the lines of a pool.
func appendLines(b []byte, pool string, demand int64, terms []policy.Terms) []byte {
	for _, t := range terms {
		b = append(append(b, pool...), ' ')
		b = append(strconv.AppendInt(b, demand, 10), ' ')
		b = append(t.Append(b), '\n')
	}
	return b
}

func decodeShare(text string) (share, error) {
	s := newShare(0)
	lines := bufio.NewScanner(strings.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		if n == 1 {
			us, err := strconv.ParseInt(rest, 10, 64)
			if word != "lease" || err != nil || us < 0 {
				return share{}, fmt.Errorf("%w: share: line 1 is %q, want lease and microseconds", ErrRecord, lines.Text())
			}
			s.lease = time.Duration(us) * time.Microsecond
			continue
		}
		wanted, rest, _ := strings.Cut(rest, " ")
		demand, err := strconv.ParseInt(wanted, 10, 64)
		if err != nil || demand < 0 {
			return share{}, fmt.Errorf("%w: share: line %d: %q is no demand", ErrRecord, n, wanted)
		}
		t, err := policy.DecodeTerms(rest)
		if err != nil {
			return share{}, fmt.Errorf("%w: share: line %d: %w", ErrRecord, n, err)
		}
		s.terms[word], s.demand[word] = append(s.terms[word], t), demand
	}
	if err := lines.Err(); err != nil {
		return share{}, fmt.Errorf("%w: share: %w", ErrRecord, err)
	}
	if s.lease == 0 && len(s.terms) == 0 {
		return share{}, fmt.Errorf("%w: share: it is empty", ErrRecord)
	}
	return s, nil
}
