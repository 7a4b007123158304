package lua

import "github.com/tokenrefill/refiller/policy"

// Flow is the flow of a bucket for which a take is made.
type Flow struct {
	Name string
	// Divided makes the take by the right of the flow, if the bucket is divided at present. Without it the take is made in
	// order of arrival.
	Divided bool
}

// append adds the keys and arguments that a call needs to take by the right of the flow. It adds none if the call is
// made in order of arrival.
func (f Flow) append(keys []string, args []any, key string) ([]string, []any, error) {
	if f.Divided {
		args = append(args, f.Name)
	}
	return f.appendKeys(keys, key), args, policy.CheckFlow(f.Name)
}

// appendKeys adds the keys of the bucket's plan and demand to those of a call. It adds none if the call is made in
// order of arrival. While a Cluster moves the bucket's slot and the plan is on another server, a call is repeated
// without them.
func (f Flow) appendKeys(keys []string, key string) []string {
	if !f.Divided {
		return keys
	}
	return append(keys, FlowsKey(key), UseKey(key))
}
