// Package keylabel makes labels of metrics from keys. There may be any number of keys, but there must be few labels.
package keylabel

import "strings"

// Other is the label of keys that match no entry.
const Other = "other"

// Of returns a function that gives each key its label. Each entry is a key, or a prefix with a * behind it. The label
// of a key is the entry that equals it. If there is none, it is the longest prefix that matches. If no prefix matches
// either, it is [Other].
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
