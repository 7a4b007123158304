package envoy

import "strings"

// level determines how metrics name an entry of a limit's descriptor.
type level struct {
	value   string // in the file
	runtime bool   // metrics show the value in the request instead
}

// label returns the name of a limit in metrics, in the form of the reference service. It has the domain, and each key
// with its value in the file. If the file asks for that, the name has the value in the request instead. fromRequest
// reports whether the name has values of the request. There may be any number of such names. Values that share a limit
// have the name of their pattern.
func (l *rateLimit) label(domain string, named []entry) (label string, fromRequest bool) {
	entries := make([]entry, len(named))
	for i, e := range named {
		entries[i] = entry{e.key, l.levels[i].value}
		if l.levels[i].runtime && e.value != entries[i].value {
			entries[i].value = e.value
			fromRequest = true
		}
	}
	return labelOf(domain, entries), fromRequest
}

// labelOf joins a domain and entries.
func labelOf(domain string, entries []entry) string {
	var b strings.Builder
	b.WriteString(domain)
	for _, e := range entries {
		b.WriteByte('.')
		b.WriteString(e.key)
		if e.value != "" {
			b.WriteByte('_')
			b.WriteString(e.value)
		}
	}
	return b.String()
}
