// Package keylabel makes labels of metrics, which must be few, of keys, which may be without number.
package keylabel

import "strings"

// Other is the label of the keys that no entry is for.
const Other = "other"

// Of makes labels from a list: a key, or a prefix with a * behind it, whose label is itself. A key gets its own entry,
// else the one of its longest prefix, else [Other].
func Of(entries []string) func(key string) string {
	exact := make(map[string]bool)
	var prefixes []string
	for _, e := range entries {
		if prefix, ok := strings.CutSuffix(e, "*"); ok {
			prefixes = append(prefixes, prefix)
		} else {
			exact[e] = true
		}
	}
	return func(key string) string {
		if exact[key] {
			return key
		}
		label, longest := Other, -1
		for _, p := range prefixes {
			if len(p) > longest && strings.HasPrefix(key, p) {
				label, longest = p+"*", len(p)
			}
		}
		return label
	}
}
