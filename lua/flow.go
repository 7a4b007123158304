package lua

import "github.com/tokenrefill/refiller/policy"

// Flow is the flow of a bucket for which a take is.
type Flow struct {
	Name string
	// Divided has the take made by the right of the flow, if the bucket is divided at present. Otherwise the take is made
	// in order of arrival.
	Divided bool
}

// append adds to the keys and arguments of a call those by which a bucket is divided, unless the call is made in order
// of arrival.
func (f Flow) append(keys []string, args []any, key string) ([]string, []any, error) {
	if !f.Divided {
		return keys, args, nil
	}
	return f.appendKeys(keys, key), append(args, f.Name), policy.CheckFlow(f.Name)
}

// appendKeys adds the keys by which a bucket is divided to those of a call, unless the call is made in order of
// arrival. That is also what a call does while a Cluster moves the bucket's slot and the plan is elsewhere.
func (f Flow) appendKeys(keys []string, key string) []string {
	if !f.Divided {
		return keys
	}
	return append(keys, FlowsKey(key), UseKey(key))
}
