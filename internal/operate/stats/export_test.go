package stats

// Bounds of what is remembered of flows.
const (
	MaxDivided = maxDivided
	FlowsKept  = flowsKept
)
