package envoy

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/policy"
)

// ErrLimits is returned for a file of rate limits with errors. The error names the file and each wrong field.
var ErrLimits = errors.New("sidecar: bad rate limits")

// Limits maps Envoy's descriptors to buckets and windows.
type Limits struct {
	// Shadow treats every descriptor as if it had shadow_mode.
	Shadow bool
	// Quota treats every limit as if it had quota_mode.
	Quota bool
	// Headers are added to the response. A denial also gets Retry-After. If Headers is nil, none is added.
	Headers *HeaderNames

	domains map[string]*node
	windows *Windows
	files   map[string]content
}

// HeaderNames are the names of the headers for the limit, the remaining tokens, and the seconds until the limit is
// reset.
type HeaderNames struct{ Limit, Remaining, Reset string }

// content describes a file of limits.
type content struct {
	domain string
	limits int
}

// Describe returns the domain of a file and its number of limits.
func (r *Limits) Describe(file string) (domain string, limits int) {
	d := r.files[file]
	return d.domain, d.limits
}

// rateLimit is the limit that decides about a descriptor: unlimited, a bucket or a window.
type rateLimit struct {
	name      string
	replaces  map[string]bool
	unlimited bool
	shadow    bool
	quota     bool
	upTo      bool             // if there are too few tokens, a request takes all that are left
	metadata  *structpb.Struct // for the response to a request within the limit
	bucket    template         // of the bucket's name
	flow      template         // of the flow's name; empty if the limit has no flows
	leave     policy.Leave     // of the bucket
	window    taker            // nil if the limit is a bucket
	per       quota            // the number of requests and the unit of time of the window
	// shared and levels have an element for each descriptor from the root to this one. shared reports whether all values
	// that match the descriptor's pattern share one limit. levels has the name of the descriptor in metrics.
	shared []bool
	levels []level
}

// fileDomain is the structure of a file. It is the same as in Envoy's reference service.
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
	Metadata       map[string]any   `yaml:"metadata"`
	DetailedMetric bool             `yaml:"detailed_metric"` // as value_to_metric, for all entries above it, too
	ValueToMetric  bool             `yaml:"value_to_metric"` // metrics show the request's value of this entry
}

type fileLimit struct {
	Bucket          string         `yaml:"bucket"`
	Flow            string         `yaml:"flow"`
	Leave           string         `yaml:"leave"`
	Unit            string         `yaml:"unit"`
	RequestsPerUnit *call.Number   `yaml:"requests_per_unit"`
	UpTo            bool           `yaml:"up_to"`
	Unlimited       bool           `yaml:"unlimited"`
	Name            string         `yaml:"name"`
	Replaces        []fileReplaced `yaml:"replaces"`
}

type fileReplaced struct {
	Name string `yaml:"name"`
}

// Parse parses files, which are given by name. Each file has one domain. w has the windows in Redis. If w is nil, the
// limits are checked but can't be used.
func Parse(files map[string][]byte, w *Windows) (*Limits, error) {
	r := &Limits{domains: make(map[string]*node), windows: w, files: make(map[string]content)}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		p := parser{file: name, windows: w}
		var d fileDomain
		if err := call.DecodeYAML(files[name], &d); err != nil {
			p.bad("", "%v", err)
		} else {
			p.add(r.domains, d)
		}
		r.files[name] = content{d.Domain, p.limits}
		errs = append(errs, p.errs...)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return r, nil
}

// parser parses a file and collects its errors.
type parser struct {
	file    string
	windows *Windows
	limits  int
	errs    []error
}

func (p *parser) bad(field, format string, args ...any) {
	where := p.file
	if field != "" {
		where += ": " + field
	}
	p.errs = append(p.errs, fmt.Errorf("%w: %s: %s", ErrLimits, where, fmt.Sprintf(format, args...)))
}

func (p *parser) add(domains map[string]*node, d fileDomain) {
	if d.Domain == "" {
		p.bad("domain", "it is missing")
	} else if domains[d.Domain] != nil {
		p.bad("domain", "%q is also the domain of another file; put all of its descriptors into one file", d.Domain)
	}
	domains[d.Domain] = p.nodes("", d.Descriptors, nil)
}

// nodes makes the node that contains the descriptors ds. path has the descriptors above them.
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
		} else if d.ShadowMode || d.QuotaMode || d.Metadata != nil {
			p.bad(at, "shadow_mode, quota_mode and metadata need a rate_limit")
		}
		if strings.Contains(d.Key, "*") {
			p.bad(at+".key", "%q: a star is a wildcard in values, and not allowed in keys", d.Key)
		}
		if !strings.Contains(d.Value, "*") {
			e := entry{d.Key, d.Value}
			if n.exact[e] != nil {
				p.bad(at, "two descriptors have the key %q and the value %q", d.Key, d.Value)
			}
			if d.ShareThreshold {
				p.bad(at+".share_threshold", "it needs a value that contains a *")
			}
			n.exact[e] = child
			continue
		}
		if slices.ContainsFunc(n.patterns, func(o pattern) bool { return o.key == d.Key && o.value == d.Value }) {
			p.bad(at, "two descriptors have the key %q and the value %q", d.Key, d.Value)
		}
		n.patterns = append(n.patterns, pattern{d.Key, d.Value, strings.Split(d.Value, "*"), child})
	}
	return n
}

func (p *parser) limit(at string, d fileDescriptor, path []fileDescriptor) *rateLimit {
	p.limits++
	f := *d.RateLimit
	l := &rateLimit{
		name: f.Name, unlimited: f.Unlimited, shadow: d.ShadowMode, quota: d.QuotaMode, upTo: f.UpTo,
		replaces: make(map[string]bool),
	}
	for _, d := range path {
		l.shared = append(l.shared, d.ShareThreshold)
		l.levels = append(l.levels, level{value: d.Value, runtime: d.ValueToMetric})
	}
	if d.DetailedMetric {
		for i := range l.levels {
			l.levels[i].runtime = true
		}
	}
	for i, r := range f.Replaces {
		if r.Name == "" || r.Name == f.Name {
			p.bad(fmt.Sprintf("%s.rate_limit.replaces[%d]", at, i), "want the name of another rate_limit")
		}
		l.replaces[r.Name] = true
	}
	if d.ShadowMode && d.QuotaMode {
		p.bad(at, "shadow_mode and quota_mode can't be used together")
	}
	if d.Metadata != nil {
		var err error
		l.metadata, err = structpb.NewStruct(d.Metadata)
		if err != nil {
			p.bad(at+".metadata", "%v", err)
		}
	}
	at += ".rate_limit"
	for _, of := range []struct{ field, text string }{{".leave", f.Leave}, {".flow", f.Flow}} {
		if of.text != "" && f.Bucket == "" {
			p.bad(at+of.field, "it needs a bucket")
		}
	}
	windowed := f.Unit != "" || f.RequestsPerUnit != nil
	switch {
	case f.Bucket != "" && !windowed && !f.Unlimited:
		p.bucket(at, l, f, path)
	case windowed && f.Bucket == "" && !f.Unlimited:
		p.window(at, l, f)
	case f.Unlimited && f.Bucket == "" && !windowed && !f.UpTo:
	default:
		p.bad(at, "want exactly one of these: bucket; unit and requests_per_unit; unlimited without up_to")
	}
	return l
}

func (p *parser) bucket(at string, l *rateLimit, f fileLimit, path []fileDescriptor) {
	var err error
	l.bucket, err = parseTemplate(f.Bucket, path)
	if err != nil {
		p.bad(at+".bucket", "%v", err)
	}
	if f.Flow != "" {
		l.flow, err = parseFlow(f.Flow, path)
		if err != nil {
			p.bad(at+".flow", "%v", err)
		}
	}
	if f.Leave == "" {
		return
	}
	l.leave, err = policy.ParseLeave(f.Leave)
	if err != nil {
		p.bad(at+".leave", "%v", err)
	}
}

func (p *parser) window(at string, l *rateLimit, f fileLimit) {
	u, ok := units[strings.ToLower(f.Unit)]
	if !ok {
		p.bad(at+".unit", "%q is not one of second, minute, hour, day, week, month, year", f.Unit)
	}
	l.window = blocked{}
	if f.RequestsPerUnit == nil {
		p.bad(at+".requests_per_unit", "it is missing")
		return
	}
	n, err := f.RequestsPerUnit.Read(fields.Integer(0, math.MaxUint32))
	if err != nil {
		p.bad(at+".requests_per_unit", "%v", err)
	}
	if !ok || err != nil {
		return
	}
	l.per = quota{u, uint32(n)}
	if p.windows == nil {
		return
	}
	l.window, err = p.windows.taker(l.per)
	if err != nil {
		p.bad(at, "%v", err)
	}
}
