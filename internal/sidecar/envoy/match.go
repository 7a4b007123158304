package envoy

import (
	"slices"
	"strings"
)

// node is a descriptor of a file with the descriptors nested in it. The root of a domain has no key. The limit is nil
// if none applies at this depth.
type node struct {
	limit    *rateLimit
	exact    map[entry]*node
	patterns []pattern // in the order of the file
}

type entry struct{ key, value string } // the value "" matches any value

// pattern is a descriptor whose value has stars.
type pattern struct {
	key, value string
	texts      []string // before, between and after the stars
	*node
}

// match reports whether a value fits. A star matches any text, also an empty one.
func (p pattern) match(value string) bool {
	first, last := p.texts[0], p.texts[len(p.texts)-1]
	rest, ok := strings.CutPrefix(value, first)
	if !ok {
		return false
	}
	rest, ok = strings.CutSuffix(rest, last)
	if !ok {
		return false
	}
	for _, text := range p.texts[1 : len(p.texts)-1] {
		_, rest, ok = strings.Cut(rest, text)
		if !ok {
			return false
		}
	}
	return true
}

// match returns the limit for the entries of a request, and the entries that name the limit. As in the reference
// service, an exact value has precedence over a pattern, and a pattern over a descriptor without a value. A limit
// applies only to requests with exactly as many entries as its depth.
func (n *node) match(entries []entry) (*rateLimit, []entry) {
	named := slices.Clone(entries)
	patterns := make([]string, len(entries))
	for i, e := range entries {
		var child *node
		if e.value != "" {
			child = n.exact[e]
		}
		for _, p := range n.patterns {
			if child == nil && p.key == e.key && p.match(e.value) {
				child, patterns[i] = p.node, p.value
			}
		}
		if child == nil {
			child = n.exact[entry{e.key, ""}]
		}
		if child == nil {
			return nil, nil
		}
		n = child
	}
	if n.limit == nil {
		return nil, nil
	}
	for i, shared := range n.limit.shared {
		if shared {
			named[i].value = patterns[i]
		}
	}
	return n.limit, named
}
