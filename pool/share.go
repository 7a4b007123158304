package pool

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// ErrRecord is returned if the content of a key can't be decoded.
var ErrRecord = errors.New("pool: bad record")

// share is the content of the key share/<region>.
type share struct {
	lease time.Duration // of the longest grant; a coordinator may have to wait that long for the end of all grants
	pools map[string]grants
}

// grants are the offers of a pool to a region.
type grants struct {
	// terms are the terms that may be in force, the newest first. The older ones count against the pool until the region
	// has acknowledged newer ones, or until they have ended.
	terms  []policy.Terms
	demand int64 // as the coordinator computed it, in tokens per Per of the newest terms; for people to read
	// since is the version of the settings with which the region joined the pool; 0 if it is not in the pool. If the
	// region joined again with another version, the fields joined and open are no longer valid, because the region may
	// have had a bucket of its own in between.
	since  int64
	joined bool // the region has acknowledged terms that were offered since then
	open   bool // all regions of the pool had acknowledged terms, so it lends more than floors

	doubled  bool // another Redis reports under the region's name, too
	restored bool // a region has shown a grant that etcd doesn't have; for a lease, other regions may have such grants
}

const grantNumbers = 12

// flags returns the flags of a pool, in the order of their bits in the record, the lowest first.
func (g *grants) flags() []*bool { return []*bool{&g.joined, &g.open, &g.restored, &g.doubled} }

// shareHead returns the first line of a share.
func shareHead(lease time.Duration) []byte {
	return fmt.Appendf(nil, "%s lease %d\n", format, lease.Microseconds())
}

// append appends the lines of a pool.
func (g grants) append(b []byte, rows *table, pool string) []byte {
	flags := int64(0)
	for i, set := range g.flags() {
		if *set {
			flags |= 1 << i
		}
	}
	for _, t := range g.terms {
		b = rows.append(b, pool, t.Fence.Seq, t.GrantTokens, g.demand, t.GrantEnd, // numbers that often differ come first
			flags, t.Fence.Epoch, t.Per, t.Interval, t.Capacity, t.Tokens, t.GrantEra, g.since)
	}
	return b
}

func decodeShare(text string) (share, error) {
	lease, rest, err := lines(text, "lease")
	if err != nil {
		return share{}, fmt.Errorf("share: %w", err)
	}
	us, err := strconv.ParseInt(lease, 10, 64)
	if err != nil || us < 0 {
		return share{}, fmt.Errorf("share: %w: its lease is %.40q, want microseconds", ErrRecord, lease)
	}
	s := share{time.Duration(us) * time.Microsecond, make(map[string]grants, len(rest))}
	var rows table
	for _, line := range rest {
		pool, n, err := rows.parse(line, grantNumbers)
		if err != nil {
			return share{}, fmt.Errorf("share: %w", err)
		}
		g := grants{demand: n[2], since: n[11]}
		flags := g.flags()
		if slices.Min(n) < 0 || n[4]>>len(flags) != 0 || n[5] > maxEpoch || min(n[6], n[7], n[8]) < 1 {
			return share{}, fmt.Errorf("share: %w: %s has a number out of range", ErrRecord, pool)
		}
		t := termsOf(n[1], n[9], n[8], n[6], time.Duration(n[7])*time.Microsecond)
		t.Fence = policy.Fence{Epoch: n[5], Seq: n[0]}
		t.GrantEnd = n[3]
		t.GrantEra = n[10]
		g.terms = append(s.pools[pool].terms, t)
		for i, set := range flags {
			*set = n[4]&(1<<i) != 0
		}
		s.pools[pool] = g
	}
	return s, nil
}
