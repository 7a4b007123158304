package envoy

import (
	"fmt"
	"slices"
	"strings"
)

// Dump lists the limits in force, one in a line, in the form of the reference service and in alphabetical order.
func (s *Server) Dump() string {
	var lines []string
	for domain, root := range s.limits.Load().domains {
		lines = append(lines, root.dump(domain)...)
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// dump lists the limits of a node and of those below it. label names the node.
func (n *node) dump(label string) []string {
	var lines []string
	if n.limit != nil {
		lines = append(lines, label+": "+n.limit.String()+"\n")
	}
	for e, child := range n.exact {
		lines = append(lines, child.dump(label+labelOf("", []entry{e}))...)
	}
	for _, p := range n.patterns {
		lines = append(lines, p.dump(label+labelOf("", []entry{{p.key, p.value}}))...)
	}
	return lines
}

// String returns a description of the limit.
func (l *rateLimit) String() string {
	what := fmt.Sprintf("unit=%s requests_per_unit=%d", strings.ToUpper(l.per.unit.name), l.per.requests)
	switch {
	case l.unlimited:
		what = "unlimited"
	case l.window == nil:
		what = "bucket=" + l.bucket.source
	}
	return fmt.Sprintf("%s, shadow_mode: %t, quota_mode: %t", what, l.shadow, l.quota)
}
