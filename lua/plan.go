package lua

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// PlanCall is a call that writes a plan: how one bucket is divided among its flows.
type PlanCall struct {
	Key  string
	Plan policy.Plan
	// Base is the version of the plan that Plan changes. It is ignored if Plan is Whole.
	Base policy.Version
}

// PlanResult is the reply to a PlanCall: an error, or the demand of the bucket's flows.
type PlanResult struct {
	// Stale reports that nothing was written. Either the plan of a later refill is in force, or the plan in force is not
	// the one that Plan changes.
	Stale bool
	Now   int64 // Unix µs, on the server's clock
	Clock int64 // the clock of the division, µs
	Use   policy.Use
	Err   error
}

// PlanBatch makes many PlanCalls in one round trip. Each bucket has its own error. The results are in the order of the
// calls.
func PlanBatch(ctx context.Context, rdb redis.UniversalClient, calls []PlanCall) []PlanResult {
	results := make([]PlanResult, len(calls))
	cmds, errs := planScript.pipelined(ctx, rdb, len(calls), func(i int) ([]string, []any) {
		return planKeys(calls[i].Key), planArgs(&calls[i])
	})
	for i := range calls {
		if errs[i] != nil {
			results[i].Err = errs[i]
			continue
		}
		results[i] = readPlan(cmds[i].Val(), calls[i].Key)
	}
	return results
}

func planKeys(key string) []string { return []string{TokensKey(key), FlowsKey(key), UseKey(key)} }

// planArgs returns the arguments of a call: see plan.lua.
func planArgs(c *PlanCall) []any {
	p := &c.Plan
	base := c.Base
	if p.Whole {
		base = policy.Version{}
	}
	price := 0.0
	teams := make([]any, 0, 3*len(p.Teams))
	for _, t := range p.Teams {
		if t.Name == policy.RootTeam {
			price = t.Price
			continue
		}
		teams = append(teams, t.Name, policy.FormatPrice(t.Price), policy.FormatPrice(t.Rest))
	}
	lasts := (time.Duration(p.Lasts) * time.Microsecond).Milliseconds()
	args := make([]any, 0, 14+len(teams)+3*len(p.Listed)+len(p.Dropped))
	args = append(args, p.Version.Era, p.Version.Index, base.Era, base.Index, flag(p.Kept), flag(p.Read),
		p.Floor, p.Unlisted, p.Most, p.Span, policy.FormatPrice(price), lasts, len(teams)/3)
	args = append(args, teams...)
	args = append(args, len(p.Listed))
	for _, f := range p.Listed {
		args = append(args, f.Name, f.Weight, f.Took)
	}
	for _, name := range p.Dropped {
		args = append(args, name)
	}
	return args
}

// readPlan decodes the reply to the call for a bucket.
func readPlan(v any, key string) PlanResult {
	r, code, err := open(v, planKeys(key), codeDone, codeDenied)
	if err != nil {
		return PlanResult{Err: err}
	}
	if code == codeDenied {
		return PlanResult{Stale: true, Err: r.End()}
	}
	result := PlanResult{Now: r.Int(), Clock: r.Int(), Use: policy.Use{Covered: r.Int()}}
	fields := next[[]any](r, "what flows asked for")
	result.Err = r.End()
	if result.Err == nil {
		result.Err = readUse(fields, &result.Use)
	}
	return result
}

// beganField is the field of {K}:use with the beginning of the period. deniedPrefix is the beginning of the fields with
// denied tokens. See division.lua.
const (
	beganField   = "//"
	deniedPrefix = "/!"
)

// readUse decodes the fields and values of {K}:use. It leaves out the field with the beginning of the period, and
// negative numbers.
func readUse(fields []any, use *policy.Use) error {
	if len(fields)%2 != 0 {
		return fmt.Errorf("%w: %d fields and values of what flows asked for", ErrBadReply, len(fields))
	}
	use.Asked = make(map[string]int64, len(fields)/2)
	for i := 0; i < len(fields); i += 2 {
		name, named := fields[i].(string)
		text, valued := fields[i+1].(string)
		n, err := strconv.ParseInt(text, 10, 64)
		if !named || !valued || err != nil {
			return fmt.Errorf("%w: %v and %v for what a flow asked for", ErrBadReply, fields[i], fields[i+1])
		}
		denied := strings.HasPrefix(name, deniedPrefix)
		switch {
		case name == beganField || n < 0:
		case denied:
			if use.Denied == nil {
				use.Denied = map[string]int64{}
			}
			use.Denied[name[len(deniedPrefix):]] = n
		default:
			use.Asked[name] = n
		}
	}
	return nil
}
