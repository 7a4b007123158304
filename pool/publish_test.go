package pool

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// smallEtcd is a registry that refuses requests of more than 1.5 MiB, as etcd does.
type smallEtcd struct {
	registry // the other methods aren't called
	shares   map[string]string
}

func (s *smallEtcd) commit(_ context.Context, _ leadership, writes []write) (int64, error) {
	size := 0
	for _, w := range writes {
		size += len(w.key) + len(w.value)
	}
	if size > 3<<19 {
		return 0, fmt.Errorf("etcdserver: request is too large: %d bytes", size)
	}
	for _, w := range writes {
		s.shares[w.key] = w.value
	}
	return 1, nil
}

func TestAShareThatIsTooLargeStopsNoOtherRegion(t *testing.T) {
	t.Parallel()
	etcd := &smallEtcd{shares: map[string]string{}}
	c := newCoordinator(etcd, DefaultTiming(), hclog.NewNullLogger())
	term := newTerm(c, leadership{revision: 7})
	offered := func(pool, region string) {
		l := term.ledgers[pool]
		if l == nil {
			l = newLedger(pool)
			term.ledgers[pool], term.order = l, nil
		}
		terms := l.terms(5, 1, 100)
		terms.Fence = term.nextFence()
		l.account(region).add(offer{terms: terms}, time.Now())
		term.dirty[region] = true
	}
	for i := range 40_000 {
		offered(fmt.Sprintf("pool-with-a-name-of-fifty-characters-in-the-end-%05d", i), "large")
	}
	offered("payments", "alive")
	offered("payments", "zone")
	require.NoError(t, term.publish(t.Context()))
	require.Contains(t, etcd.shares, shareKeys+"alive")
	require.Contains(t, etcd.shares, shareKeys+"zone")
	require.NotContains(t, etcd.shares, shareKeys+"large")
	require.EqualValues(t, 1, c.Stats().TooLarge)
}

func TestUnacknowledgedOffersAreMergedAcrossUnits(t *testing.T) {
	t.Parallel()
	a := &account{}
	units := []unit{{micros: 1_000_000}, {micros: 999_999}}
	most := claim{}
	for i := range 600 {
		terms := policy.Terms{
			Fence: policy.Fence{Epoch: 1, Seq: int64(i + 1)}, Per: units[i/100%2].micros, Tokens: int64(i % 7),
			GrantTokens: int64(100 + i%13),
			GrantEra:    9, Capacity: int64(50 + i%5),
		}
		a.add(offer{terms: terms, until: time.Unix(int64(i), 0)}, time.Unix(int64(i), 0))
		most.add(units[0], terms)
	}
	require.LessOrEqual(t, len(a.offers), maxOffers)
	claimed, _ := a.claims(units[0])
	require.GreaterOrEqual(t, claimed.rate, most.rate, "the claim includes every rate that may be in force")
	require.GreaterOrEqual(t, claimed.floor, most.floor)
	require.LessOrEqual(t, claimed.rate, most.rate+6, "the claim is too high only by rounding at changes of the unit")
}

// A coordinator begins after a pool was removed. It still counts the rates of the pool that the regions may be using.
func TestTheClaimOfARemovedPoolIsCounted(t *testing.T) {
	t.Parallel()
	terms := termsOf(7, 3, 100, 1_000_000, time.Second)
	terms.Fence = policy.Fence{Epoch: 1, Seq: 1}
	terms.GrantEra = 9
	g := grants{terms: []policy.Terms{terms}, joined: true, open: true}
	text := g.append(shareHead(time.Second), &table{}, "payments")
	term := newTerm(newCoordinator(nil, DefaultTiming(), nil), leadership{revision: 1})
	require.NoError(t, term.applyShare("eu", entry{key: shareKeys + "eu", value: string(text), revision: 5}, time.Now()))
	require.InDelta(t, 7, term.ledgers["payments"].sum().Claimed, 1e-9)
}

func TestAFenceGivesARegionNoPartInOtherPools(t *testing.T) {
	t.Parallel()
	l := newLedger("payments")
	l.configure(new(simPool("payments")))
	l.declare("mars", fenced)
	require.NotContains(t, l.accounts, "mars")
	l.declare("eu", fenced)
	require.Equal(t, fenced, l.accounts["eu"].declared)
}
