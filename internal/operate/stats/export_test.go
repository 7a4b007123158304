package stats

// These are the bounds of the flows that are remembered.
const (
	MaxDivided = maxDivided
	FlowsKept  = flowsKept
)
