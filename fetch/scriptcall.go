package fetch

import (
	"context"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// mostBuckets is the largest number of buckets in one script call, so that the call doesn't occupy the server for long.
// More buckets are in further calls of the same round trip.
const mostBuckets = 128

// scriptCall is one call of a script. It makes takes from several buckets, or from one lazy bucket.
type scriptCall struct {
	groups []*group
	takes  lua.TakesCall
	words  []lua.Takes
	byFlow bool // the takes name their flows; then flows and shares are used in place of takes and words
	flows  lua.FlowTakesCall
	shares []lua.FlowTakes
	text   bool // the command has the script's text in place of its name
	cmd    redis.Cmder
}

func (call *scriptCall) lazy() bool { return !call.byFlow && call.words[0].Lazy != nil }

// command returns the call's command, with the script's text or its name.
func (call *scriptCall) command(ctx context.Context) (redis.Cmder, error) {
	if call.byFlow {
		return call.flows.Command(ctx, call.shares, call.text)
	}
	return call.takes.Command(ctx, call.words, call.text)
}

// replies reads the answer to the command, which ended with err.
func (call *scriptCall) replies(err error) ([]lua.TakesReply, error) {
	if call.byFlow {
		return call.flows.Read(err)
	}
	return call.takes.Read(err)
}

// loaded returns the flag that records whether the server has the script.
func (call *scriptCall) loaded(s *node) *atomic.Bool {
	if call.byFlow {
		return &s.flowsLoaded
	}
	if call.words[0].Whole {
		return &s.takesLoaded
	}
	return &s.takeLoaded
}
