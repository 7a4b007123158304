package lua

import "github.com/tokenrefill/refiller/policy"

// Flow is the flow of a bucket for which a take is made.
type Flow struct {
	Name string
	// Divided makes the take use the flow's right, if the bucket is divided at present. If Divided is false, the take is
	// served in order of arrival.
	Divided bool
}

// append adds the keys and arguments that a call needs to use the flow's right. It adds none if Divided is false.
func (f Flow) append(keys []string, args []any, key string) ([]string, []any, error) {
	if f.Divided {
		args = append(args, f.Name)
	}
	return f.appendKeys(keys, key), args, policy.CheckFlow(f.Name)
}

// appendKeys adds the keys of the bucket's plan and demand to those of a call. It adds none if Divided is false. While
// a Cluster moves the bucket's slot, the plan may be on another server. Then the caller repeats the call without these
// keys.
func (f Flow) appendKeys(keys []string, key string) []string {
	if !f.Divided {
		return keys
	}
	return append(keys, FlowsKey(key), UseKey(key))
}
