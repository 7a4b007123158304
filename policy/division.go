package policy

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// MaxFlowLen is the length of the longest name of a flow, in bytes.
const MaxFlowLen = 256

// ErrInvalidFlow is returned for a name that no flow can have.
var ErrInvalidFlow = errors.New("policy: invalid flow")

// CheckFlow returns an error if name can't be that of a flow. A name has at most MaxFlowLen bytes, and none of its
// levels is empty. The empty name is valid: it is for takes without a flow.
func CheckFlow(name string) error {
	switch {
	case len(name) > MaxFlowLen:
		return fmt.Errorf("%w: it has %d bytes; want 1 to %d", ErrInvalidFlow, len(name), MaxFlowLen)
	case strings.HasPrefix(name, "/"), strings.HasSuffix(name, "/"), strings.Contains(name, "//"):
		return fmt.Errorf("%w %q: one of its levels is empty; want 1 to 3 levels with slashes between", ErrInvalidFlow,
			name)
	}
	return nil
}

// RootTeam is the team of flows whose names have one level. The name of every other team is the part of a flow's name
// up to a slash, and ends with the slash. So no team has the name of a flow.
const RootTeam = "/"

// TeamsOf returns the teams of a flow. The first one is RootTeam, and the narrowest one is last. Each level of the name
// except the last one adds a team. A name has at most three levels; further slashes are part of the third one.
func TeamsOf(name string) (teams []string) {
	teams = append(teams, RootTeam)
	for at := 0; len(teams) < 3; {
		i := strings.IndexByte(name[at:], '/')
		if i < 0 {
			break
		}
		at += i + 1
		teams = append(teams, name[:at])
	}
	return teams
}

// FlowRun is a run of takes of one flow.
type FlowRun struct {
	Flow string
	Run
}

// Plan describes how a bucket is divided among its flows until the next plan. A refiller writes it beside the bucket.
// Its numbers without a comment are explained in lua/shared/division.lua.
type Plan struct {
	Version  Version // of the refill that it comes with
	Whole    bool    // the plan lists all flows; otherwise only those to add to the plan before
	Kept     bool    // the list of the plan before stays, if there is one
	Read     bool    // the demand is read, and then counted from 0
	Floor    int64
	Unlisted int64
	Most     int64
	Span     int64
	Lasts    int64 // µs for which the plan is in force
	Teams    []PlannedTeam
	Listed   []PlannedFlow
	Dropped  []string // flows that are no longer listed
}

// PlannedTeam is a team of a plan. The prices are explained in lua/shared/division.lua.
type PlannedTeam struct {
	Name        string
	Price, Rest float64
}

// FormatPrice writes a price as the scripts read it.
func FormatPrice(price float64) string { return strconv.FormatFloat(price, 'g', 9, 64) }

// PlannedFlow is a flow that a plan lists. A flow that is new in the list begins with the right to a tenth of the
// floor, less the tokens that it took.
type PlannedFlow struct {
	Name   string
	Weight int64
	Took   int64 // tokens that it took lately
}

// Use is the demand of a bucket's flows, as a refiller reads it.
type Use struct {
	Asked, Denied map[string]int64 // tokens by name: of a flow, or of a team for its flows that are counted together
	Covered       int64            // µs in which they were counted; 0 if nothing was read
}
