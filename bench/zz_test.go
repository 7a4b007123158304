package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime/pprof"
	"testing"
	"time"
)

var (
	zzW = flag.String("w", "hot", "")
	zzC = flag.String("c", "fetch, coalesced", "")
	zzN = flag.Int("n", 256, "")
	zzT = flag.Duration("t", 2*time.Second, "")
	zzP = flag.String("p", "", "")
)

func TestZZ(t *testing.T) {
	ctx := context.Background()
	s, err := startServer(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	for _, w := range workloads {
		if w.name != *zzW {
			continue
		}
		for _, c := range append(contenders(), bareContender()) {
			if c.name != *zzC {
				continue
			}
			ses, err := c.open(ctx, s, w, c.keys(w))
			if err != nil {
				t.Fatal(err)
			}
			e := &entrant{contender: c, session: ses}
			team := newTeam(*zzN)
			team.run(ctx, s, w, e, 200*time.Millisecond)
			if *zzP != "" {
				f, _ := os.Create(*zzP)
				pprof.StartCPUProfile(f)
				defer pprof.StopCPUProfile()
			}
			got, err := team.run(ctx, s, w, e, *zzT)
			fmt.Printf("%s %s %d: %+v %v\n", w.name, c.name, *zzN, got, err)
		}
	}
}
