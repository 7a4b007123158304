package dev

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOptionsOfRegionsAreChecked(t *testing.T) {
	t.Parallel()
	good := Options{Program: "refiller", Out: io.Discard, Regions: []string{"eu", "us"}}
	require.NoError(t, good.Validate())
	for says, change := range map[string]func(o *Options){
		"want 2 to 6 names":         func(o *Options) { o.Regions = []string{"eu"} },
		`"eu" is there twice`:       func(o *Options) { o.Regions = []string{"eu", "eu"} },
		"letters, digits":           func(o *Options) { o.Regions = []string{"e u", "us"} },
		"--duration -1s":            func(o *Options) { o.Duration = -time.Second },
		"--cut ap: want one of the": func(o *Options) { o.Cut = "ap" },
		"--cut-after -1s":           func(o *Options) { o.CutAfter = -time.Second },
		"Out is nil":                func(o *Options) { o.Out = nil },
	} {
		o := good
		change(&o)
		require.ErrorIs(t, o.Validate(), ErrOptions)
		require.ErrorContains(t, o.Validate(), says)
	}
	names := []string{"a", "b", "c", "d", "e", "f"}
	c, err := Options{Regions: names}.config("c", "redis://h", []string{"h:1"}, nil)
	require.NoError(t, err, "every region's bucket holds two intervals of the whole rate")
	require.Len(t, c.OwnPools(), 1)
}

func TestTheViewOfRegionsShowsWhichIsCutOff(t *testing.T) {
	t.Parallel()
	eu := &region{name: "eu", share: share{rate: 934, left: 11 * time.Second, tokens: 7}, lately: taken{admitted: 900}}
	us := &region{name: "us", share: share{rate: 66, tokens: 3}, lately: taken{admitted: 66, denied: 84}}
	eu.total.admitted, us.total.admitted = 15_000, 5000
	us.isCut.Store(true)
	v := poolScene{coordinator: "eu/eu-1", playground: &playground{elapsed: 21 * time.Second, regions: []*region{eu, us}}}
	lines := v.lines(false, 0)
	require.Equal(t, "  21s  eu/eu-1 coordinates", lines[0])
	require.Regexp(t, `eu +934/s +900/s +900/s +0/s +7  █{19}·$`, lines[2])
	require.Regexp(t, `us +66/s +150/s +66/s +84/s +3  █·{19}  cut off, on its floor$`, lines[3])
	require.Regexp(t, `us +66/s +150/s +66/s +84/s +3  cut off, on its floor$`, v.lines(false, 80)[3])
	require.Equal(t, "shares in force: 1000/s of 1000/s; 20,000 of at most 24,100 tokens admitted",
		strings.TrimSpace(lines[4]))
	require.Contains(t, v.short(), "us has 66/s of 150/s wanted, 66/s admitted (cut off, on its floor)")
	us.share.left = 3 * time.Second
	require.Contains(t, v.short(), "(cut off, 3 s left of its grant)")
	us.isCut.Store(false)
	v.coordinator = ""
	require.Contains(t, v.short(), "no coordinator is known")
	require.NotContains(t, v.short(), "(")
}
