package sidecar

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/window"
)

// ErrRateLimits is returned for a file of rate limits that is wrong; the error
// names the file and each field.
var ErrRateLimits = errors.New("sidecar: bad rate limits")

// RateLimits maps Envoy's descriptors to buckets and windows.
type RateLimits struct {
	// Shadow has every descriptor answered as if it had shadow_mode.
	Shadow bool
	// Headers adds RateLimit-Limit, -Remaining and -Reset, and Retry-After to a
	// denial, to the response.
	Headers bool

	domains map[string]*node
	windows windows
}

// Domain reports whether there are limits for a domain.
func (r *RateLimits) Domain(name string) bool { return r.domains[name] != nil }

// node is a descriptor of a file with what is nested in it; the root of a domain
// has no key. The limit is nil if none applies at this depth.
type node struct {
	limit    *rateLimit
	exact    map[entry]*node
	prefixes []prefixNode // in the order of the file
}

type entry struct{ key, value string } // a value of "" is any

type prefixNode struct {
	key, prefix, pattern string
	*node
}

// rateLimit is what a descriptor is answered by: one of unlimited, bucket and
// window.
type rateLimit struct {
	name      string
	replaces  map[string]bool
	unlimited bool
	shadow    bool
	quota     bool
	bucket    template          // of the bucket's name
	leave     fetch.LeaveOption // of the bucket
	windowed  bool
	unit      unit
	requests  uint32 // per unit
	shared    []bool // of each entry: all values of its pattern share the limit
}

// The form of a file, which is that of Envoy's reference service.
type fileDomain struct {
	Domain      string           `yaml:"domain"`
	Descriptors []fileDescriptor `yaml:"descriptors"`
}

type fileDescriptor struct {
	Key            string           `yaml:"key"`
	Value          string           `yaml:"value"`
	RateLimit      *fileLimit       `yaml:"rate_limit"`
	Descriptors    []fileDescriptor `yaml:"descriptors"`
	ShadowMode     bool             `yaml:"shadow_mode"`
	QuotaMode      bool             `yaml:"quota_mode"`
	ShareThreshold bool             `yaml:"share_threshold"`
	DetailedMetric bool             `yaml:"detailed_metric"` // of the reference service's metrics
	ValueToMetric  bool             `yaml:"value_to_metric"` // likewise
}

type fileLimit struct {
	Bucket          string         `yaml:"bucket"`
	Leave           string         `yaml:"leave"`
	Unit            string         `yaml:"unit"`
	RequestsPerUnit *uint32        `yaml:"requests_per_unit"`
	Unlimited       bool           `yaml:"unlimited"`
	Name            string         `yaml:"name"`
	Replaces        []fileReplaced `yaml:"replaces"`
}

type fileReplaced struct {
	Name string `yaml:"name"`
}

// ParseRateLimits reads files, by name, of one domain each. Windows, which need
// no bucket, are kept where w says.
func ParseRateLimits(files map[string][]byte, w Windows) (*RateLimits, error) {
	r := &RateLimits{domains: make(map[string]*node), windows: windows{rdb: w.Redis, deadline: w.Deadline}}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		p := parser{file: name}
		var d fileDomain
		if err := strictYAML(files[name], &d); err != nil {
			p.bad("", "%v", err)
		} else {
			p.add(r.domains, d)
		}
		errs = append(errs, p.errs...)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

func strictYAML(data []byte, into any) error {
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		return err
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("there is more than one document")
	}
	return nil
}

// parser collects what is wrong with a file.
type parser struct {
	file string
	errs []error
}

func (p *parser) bad(field, format string, args ...any) {
	where := p.file
	if field != "" {
		where += ": " + field
	}
	p.errs = append(p.errs, fmt.Errorf("%w: %s: %s", ErrRateLimits, where, fmt.Sprintf(format, args...)))
}

func (p *parser) add(domains map[string]*node, d fileDomain) {
	if d.Domain == "" {
		p.bad("domain", "it is missing")
	} else if domains[d.Domain] != nil {
		p.bad("domain", "%q is in another file too", d.Domain)
	}
	domains[d.Domain] = p.nodes("", d.Descriptors, nil)
}

// nodes makes the node that ds are nested in; path are the descriptors down to
// it.
func (p *parser) nodes(field string, ds []fileDescriptor, path []fileDescriptor) *node {
	n := &node{exact: make(map[entry]*node)}
	for i, d := range ds {
		at := fmt.Sprintf("%sdescriptors[%d]", field, i)
		if d.Key == "" {
			p.bad(at+".key", "it is missing")
			continue
		}
		below := append(slices.Clone(path), d)
		child := p.nodes(at+".", d.Descriptors, below)
		if d.RateLimit != nil {
			child.limit = p.limit(at, d, below)
		} else if d.ShadowMode || d.QuotaMode {
			p.bad(at, "shadow_mode and quota_mode go with a rate_limit")
		}
		if d.RateLimit == nil && len(d.Descriptors) == 0 {
			p.bad(at, "it has neither a rate_limit nor descriptors")
		}
		pattern, isPrefix := strings.CutSuffix(d.Value, "*")
		if d.ShareThreshold && !isPrefix {
			p.bad(at+".share_threshold", "it goes with a value that ends in *")
		}
		if isPrefix {
			if slices.ContainsFunc(n.prefixes, func(o prefixNode) bool { return o.key == d.Key && o.prefix == pattern }) {
				p.bad(at, "key %q with value %q is there twice", d.Key, d.Value)
			}
			n.prefixes = append(n.prefixes, prefixNode{d.Key, pattern, d.Value, child})
			continue
		}
		e := entry{d.Key, d.Value}
		if n.exact[e] != nil {
			p.bad(at, "key %q with value %q is there twice", d.Key, d.Value)
		}
		n.exact[e] = child
	}
	return n
}

func (p *parser) limit(at string, d fileDescriptor, path []fileDescriptor) *rateLimit {
	f := *d.RateLimit
	l := &rateLimit{name: f.Name, unlimited: f.Unlimited, shadow: d.ShadowMode, quota: d.QuotaMode, replaces: make(map[string]bool)}
	for _, d := range path {
		l.shared = append(l.shared, d.ShareThreshold)
	}
	for i, r := range f.Replaces {
		if r.Name == "" || r.Name == f.Name {
			p.bad(fmt.Sprintf("%s.rate_limit.replaces[%d]", at, i), "want the name of another rate_limit")
		}
		l.replaces[r.Name] = true
	}
	if d.ShadowMode && d.QuotaMode {
		p.bad(at, "shadow_mode and quota_mode exclude each other")
	}
	at += ".rate_limit"
	if f.Leave != "" && f.Bucket == "" {
		p.bad(at+".leave", "it goes with a bucket")
	}
	hasWindow := f.Unit != "" || f.RequestsPerUnit != nil
	switch {
	case f.Bucket != "" && !hasWindow && !f.Unlimited:
		t, err := parseTemplate(f.Bucket, path)
		if err != nil {
			p.bad(at+".bucket", "%v", err)
		}
		l.bucket = t
		if f.Leave != "" {
			if l.leave, err = fetch.ParseLeave(f.Leave); err != nil {
				p.bad(at+".leave", "%v", err)
			}
		}
	case hasWindow && f.Bucket == "" && !f.Unlimited:
		l.windowed = true
		var ok bool
		if l.unit, ok = units[strings.ToLower(f.Unit)]; !ok {
			p.bad(at+".unit", "%q is not one of second, minute, hour, day, week, month, year", f.Unit)
		}
		if f.RequestsPerUnit == nil {
			p.bad(at+".requests_per_unit", "it is missing")
		} else {
			l.requests = *f.RequestsPerUnit
		}
	case f.Unlimited && f.Bucket == "" && !hasWindow:
	default:
		p.bad(at, "want one of bucket, unit with requests_per_unit, and unlimited")
	}
	return l
}

// match finds the limit for the entries of a request, and the entries as they
// name it. As in the reference service, the exact value goes before a prefix, a
// prefix before any value, and a limit applies only at its own depth.
func (n *node) match(entries []entry) (*rateLimit, []entry) {
	named := slices.Clone(entries)
	patterns := make([]string, len(entries))
	for i, e := range entries {
		child := n.exact[e]
		if child == nil {
			for _, w := range n.prefixes {
				if w.key == e.key && strings.HasPrefix(e.value, w.prefix) {
					child, patterns[i] = w.node, w.pattern
					break
				}
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

// unit is a length of time that limits are given for.
type unit struct {
	name   string
	length time.Duration
}

var units = func() map[string]unit {
	const day = 24 * time.Hour
	m := make(map[string]unit)
	for _, u := range []unit{
		{"second", time.Second}, {"minute", time.Minute}, {"hour", time.Hour}, {"day", day},
		{"week", 7 * day}, {"month", 30 * day}, {"year", 365 * day},
	} {
		m[u.name] = u
	}
	return m
}()

// window is the limiter of so many requests in a unit of time.
func (u unit) window(requests uint32) window.Config {
	return window.Config{Name: u.name, Limit: int64(requests), Window: u.length}
}
