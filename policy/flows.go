package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Limits of Flows.
const (
	MaxHeadroom     = 75 // percent
	DefaultHeadroom = 10
	MaxFlowWeight   = 1000
	MaxFlows        = 100_000
	DefaultFlows    = 10_000
	MaxFlowWeights  = 100
)

// Flows describes how a bucket is divided among its flows.
type Flows struct {
	// Headroom is the percentage of the capacity that the bucket keeps for flows that ask for little.
	Headroom int64 `json:"headroom"`
	// Weights are the weights of flows by the beginnings of their names. All other flows have weight 1.
	Weights map[string]int64 `json:"weights,omitempty"`
	// Most is the most flows that are counted separately.
	Most int64 `json:"most"`
}

// HeadroomOf returns the headroom of a bucket of a capacity, in tokens, rounded up.
func (f *Flows) HeadroomOf(capacity int64) int64 {
	return Leave{Percent: f.Headroom}.Of(capacity)
}

// WeightOf returns the weight of a flow or team within a team. It is the weight of the longest beginning of the name
// that has one. A beginning that is no longer than the team's name doesn't count, because its weight is that of the
// team among other teams.
func (f *Flows) WeightOf(name, team string) int64 {
	weight := int64(1)
	longest := 0
	if team != RootTeam {
		longest = len(team)
	}
	for prefix, w := range f.Weights {
		if len(prefix) > longest && strings.HasPrefix(name, prefix) {
			weight, longest = w, len(prefix)
		}
	}
	return weight
}

// Equal reports whether both divide a bucket in the same way. A nil Flows doesn't divide it.
func (f *Flows) Equal(g *Flows) bool {
	if f == nil || g == nil {
		return f == g
	}
	return f.Headroom == g.Headroom && f.Most == g.Most && maps.Equal(f.Weights, g.Weights)
}

// Validate reports the first field that is out of range, as a *FieldError.
func (f *Flows) Validate() error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{Field: "flows." + field, Msg: fmt.Sprintf(format, args...)}
	}
	switch {
	case f.Headroom < 0 || f.Headroom > MaxHeadroom:
		return bad("headroom", "%d%% is not from 0%% to %d%%", f.Headroom, int64(MaxHeadroom))
	case f.Most < 1 || f.Most > MaxFlows:
		return bad("most", "%d is not a whole number from 1 to %d", f.Most, int64(MaxFlows))
	case len(f.Weights) > MaxFlowWeights:
		return bad("weights", "there are %d; want at most %d", len(f.Weights), MaxFlowWeights)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Weights)) {
		if w := f.Weights[name]; w < 1 || w > MaxFlowWeight {
			return bad("weights", "that of %q, %d, is not a whole number from 1 to %d", name, w, int64(MaxFlowWeight))
		}
		if name == "" || len(name) > MaxFlowLen {
			return bad("weights", "a name that begins with %q: it has %d bytes; want 1 to %d", name, len(name), MaxFlowLen)
		}
	}
	return nil
}
