package policy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Enforce determines how the buckets of a template get their tokens.
type Enforce int

// Ways to enforce a template.
const (
	EnforceRefilled Enforce = iota // by refillers, while they are not full
	EnforceLazy                    // by the takes themselves, for the time since the last one; no refiller is needed
)

// String names the way as configurations do.
func (e Enforce) String() string {
	if e == EnforceLazy {
		return "lazy"
	}
	return "refilled"
}

// Template is the policy of every bucket whose name begins with a prefix. Such a bucket is created by its first take
// and removed some time after its last one.
type Template struct {
	// Prefix is the beginning of the names: up to MaxPrefix bytes without a closing brace. A whole segment between colons
	// may be *, which matches one or more bytes other than a colon: "user:", "tenant:*:api". The empty prefix matches
	// every name.
	Prefix string
	// Policy has a rate or a schedule. The buckets of a template with a schedule are budgets: takes credit them the steps
	// that have come, and no refiller does.
	Policy  Policy
	Enforce Enforce
	// MaxKeys bounds the buckets that exist at once; 0 for no bound. Only refilled
	// buckets can be bounded.
	MaxKeys int64
}

// WhyNoLoss is the message for a template that has on_loss.
const WhyNoLoss = "a template's bucket comes back full after a loss, since its next take creates it: leave on_loss out"

// Limits of templates.
const (
	MaxPrefix    = 256
	MaxTemplates = 256
	// MaxPlain is the most buckets with a policy of their own whose names match a template.
	MaxPlain = 1000
)

// ErrTemplates is returned for templates that contradict each other, or that can't be read.
var ErrTemplates = errors.New("policy: bad templates")

// TemplateError is a problem with one of several templates.
type TemplateError struct {
	At  int // the template's place in the list
	Err error
}

// Error implements error.
func (e *TemplateError) Error() string { return fmt.Sprintf("policy: template %d: %v", e.At, e.Err) }

// Unwrap returns the cause.
func (e *TemplateError) Unwrap() error { return e.Err }

// Validate reports the first field that is out of range, as a *FieldError.
func (t Template) Validate() error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{Field: field, Msg: fmt.Sprintf(format, args...)}
	}
	if len(t.Prefix) > MaxPrefix || strings.Contains(t.Prefix, "}") {
		return bad("prefix", "%.64q: want 0 to %d bytes without }", t.Prefix, MaxPrefix)
	}
	for segment := range strings.SplitSeq(t.Prefix, ":") {
		if segment != "*" && strings.Contains(segment, "*") {
			return bad("prefix", "%q: a * is a whole segment between colons, as in tenant:*:api", t.Prefix)
		}
	}
	if err := t.Policy.validate(t.Refilled()); err != nil {
		return err
	}
	if t.Policy.Steps != nil {
		if err := t.validateSteps(bad); err != nil {
			return err
		}
	}
	// A bucket that is full and idle expires, as if Redis had lost it. Its next take has to find it full again.
	if t.Policy.OnLoss != LossEmpty {
		return bad("on_loss", WhyNoLoss)
	}
	if initial := t.Policy.initial(); initial != t.Policy.Capacity {
		return bad("initial", "%d: a template's bucket begins full, with %d tokens", initial, t.Policy.Capacity)
	}
	if t.Enforce < EnforceRefilled || t.Enforce > EnforceLazy {
		return bad("enforce", "%d is not from 0 to %d", int(t.Enforce), int(EnforceLazy))
	}
	if t.MaxKeys < 0 || t.MaxKeys > MaxTokens {
		return bad("max_keys", "%d is not a whole number from 0 (no bound) to %d", t.MaxKeys, int64(MaxTokens))
	}
	if t.Enforce == EnforceLazy {
		return t.validateLazy(bad)
	}
	return nil
}

// Refilled reports whether refillers add the tokens of the template's buckets. Otherwise takes do.
func (t Template) Refilled() bool { return t.Enforce == EnforceRefilled && t.Policy.Steps == nil }

// Terms writes the template's policy, which must be valid, in the scripts' integers
// under a fence.
func (t Template) Terms(f Fence) Terms {
	terms := t.Policy.Terms(f)
	terms.Template = true
	return terms
}

// Limits that keep the products of the lazy script below 2^53.
const (
	maxLazyTokens = 1 << 40
	maxLazyUnits  = 1 << 52
)

func (t Template) validateLazy(bad func(string, string, ...any) error) error {
	tokens, per := t.Policy.Rate.reduced()
	switch {
	case t.Policy.Flows != nil:
		return bad("flows", "it can be set only with enforce: refilled; no refiller divides lazy buckets")
	case t.MaxKeys != 0:
		return bad("max_keys", "it can be set only with enforce: refilled; a lazy bucket is removed when it is full")
	case t.Policy.Strict:
		return bad("strict", "it can be set only with enforce: refilled; tokens of lazy buckets can't be reserved or leased")
	case tokens > maxLazyTokens:
		return bad("rate", "%s is %d tokens in %dus in lowest terms; a lazy bucket takes at most %d", t.Policy.Rate, tokens,
			per, int64(maxLazyTokens))
	case t.Policy.Capacity > maxLazyUnits/per:
		return bad("capacity", "%d: at %s a lazy bucket holds at most %d", t.Policy.Capacity, t.Policy.Rate, maxLazyUnits/per)
	}
	return nil
}

// Override is the part of the policy that is different for one key of a template. A field that is zero has the
// template's value. If each step of the template's schedule fills the template's buckets, each step also fills the
// bucket of the key.
type Override struct {
	Capacity int64
	Rate     Rate
}

// With returns the template for one key. The error is that of Validate.
func (t Template) With(o Override) (Template, error) {
	if o.Capacity != 0 {
		if t.Policy.StepTokens == t.Policy.Capacity { // a step fills the budget
			t.Policy.StepTokens = o.Capacity
		}
		t.Policy.Capacity = o.Capacity
		t.Policy.Initial = nil
	}
	if o.Rate != (Rate{}) {
		t.Policy.Rate = o.Rate
	}
	return t, t.Validate()
}

// CompiledTemplate is a template of a set, with its terms under the set's version.
type CompiledTemplate struct {
	Template
	Terms Terms
	Text  string // Terms encoded
	parts []string
}

// Templates is a set of templates. At most one of them applies to a key. The set doesn't change and is safe for
// concurrent use. A nil *Templates has no templates.
type Templates struct {
	version int64
	list    []*CompiledTemplate // the more specific one of two that match a key comes first
	plain   map[string]bool     // buckets with policies of their own
}

// NewTemplates makes a set. plain are the names of buckets that have policies of their own. Those that no template
// matches are ignored. If one template is bad, the error is a *TemplateError. If one of its fields is bad, a
// *FieldError in it names the field.
func NewTemplates(version int64, list []Template, plain []string) (*Templates, error) {
	if version < 0 || version >= OwnEpoch {
		return nil, fmt.Errorf("%w: version %d is not from 0 to %d", ErrTemplates, version, int64(OwnEpoch-1))
	}
	if len(list) > MaxTemplates {
		return nil, fmt.Errorf("%w: there are %d; want at most %d", ErrTemplates, len(list), MaxTemplates)
	}
	s := &Templates{version: version, plain: map[string]bool{}}
	for i, t := range list {
		if err := t.Validate(); err != nil {
			return nil, &TemplateError{At: i, Err: err}
		}
		r := &CompiledTemplate{Template: t, Terms: t.Terms(Fence{Epoch: version}), parts: strings.Split(t.Prefix, ":")}
		r.Text = r.Terms.Encode()
		for _, other := range s.list {
			if crossing(r.parts, other.parts) {
				return nil, &TemplateError{At: i, Err: &FieldError{Field: "prefix", Msg: ambiguity(r.Prefix, other.Prefix)}}
			}
		}
		s.list = append(s.list, r)
	}
	// If two templates match the same key, one of them matches every key that the other one matches. The more specific one
	// of the two comes first. It has more literal bytes, or the same number of them and more stars.
	slices.SortFunc(s.list, func(a, b *CompiledTemplate) int {
		stars := func(r *CompiledTemplate) int { return strings.Count(r.Prefix, "*") }
		return cmp.Or(cmp.Compare(len(b.Prefix)-stars(b), len(a.Prefix)-stars(a)), cmp.Compare(stars(b), stars(a)),
			cmp.Compare(a.Prefix, b.Prefix))
	})
	for _, key := range plain {
		if s.find(key) != nil {
			s.plain[key] = true
		}
	}
	if len(s.plain) > MaxPlain {
		return nil, fmt.Errorf("%w: %d buckets have names that a template matches; want at most %d", ErrTemplates,
			len(s.plain), MaxPlain)
	}
	return s, nil
}

func ambiguity(a, b string) string {
	if a == b {
		return fmt.Sprintf("%q is there twice", a)
	}
	return fmt.Sprintf("%q and %q both match some keys, and each matches keys that the other doesn't: "+
		"which one counts would be a guess", a, b)
}

// crossing reports whether some keys match both prefixes, and neither prefix is within the other. Equal prefixes cross.
func crossing(a, b []string) bool {
	aWider, bWider := false, false // a matches keys that b doesn't, and so on
	for i := range min(len(a), len(b)) {
		meet, x, y := compare(a[i], i == len(a)-1, b[i], i == len(b)-1)
		if !meet {
			return false
		}
		aWider, bWider = aWider || x, bWider || y
	}
	return aWider == bWider
}

// compare compares two segments at the same place. meet reports whether some keys match both segments. xWider reports
// whether x matches keys that y doesn't match, and yWider reports the reverse. The last segment of a prefix may be
// followed by any text.
func compare(x string, xLast bool, y string, yLast bool) (meet, xWider, yWider bool) {
	switch {
	case xLast && !yLast:
		switch {
		case x == "":
			return true, true, false
		case x == "*":
			return y != "", true, false
		case y == "*":
			return true, true, true
		}
		return strings.HasPrefix(y, x), true, false
	case yLast && !xLast:
		meet, yWider, xWider = compare(y, true, x, false)
		return meet, xWider, yWider
	case x == y:
		return true, false, false
	case xLast && x == "":
		return true, true, false
	case xLast && y == "":
		return true, false, true
	case x == "*":
		return y != "", true, false
	case y == "*":
		return x != "", false, true
	case xLast:
		return strings.HasPrefix(y, x) || strings.HasPrefix(x, y), len(x) < len(y), len(y) < len(x)
	}
	return false, false, false
}

// Version returns the version of the configuration that the set is from.
func (s *Templates) Version() int64 {
	if s == nil {
		return 0
	}
	return s.version
}

// All returns the templates, the more specific ones first. They are not to be changed.
func (s *Templates) All() []*CompiledTemplate {
	if s == nil {
		return nil
	}
	return s.list
}

// Of returns the template that applies to a key. It returns nil if no template matches the key, or if its bucket has a
// policy of its own.
func (s *Templates) Of(key string) *CompiledTemplate {
	if s == nil || len(s.list) == 0 {
		return nil
	}
	r := s.find(key)
	if r != nil && s.plain[key] {
		return nil
	}
	return r
}

func (s *Templates) find(key string) *CompiledTemplate {
	for _, r := range s.list {
		if r.matches(key) {
			return r
		}
	}
	return nil
}

func (r *CompiledTemplate) matches(key string) bool {
	rest := key
	for i, part := range r.parts {
		last := i == len(r.parts)-1
		if part == "*" {
			end := strings.IndexByte(rest, ':')
			if end < 0 {
				end = len(rest)
			}
			if end == 0 {
				return false
			}
			if last {
				return true
			}
			rest = rest[end:]
		} else {
			if !strings.HasPrefix(rest, part) {
				return false
			}
			if last {
				return true
			}
			rest = rest[len(part):]
		}
		if rest == "" || rest[0] != ':' {
			return false
		}
		rest = rest[1:]
	}
	return true
}

// Equal reports whether both sets have the same templates and the same version.
func (s *Templates) Equal(o *Templates) bool {
	return s.Version() == o.Version() && s.Encode() == o.Encode()
}

// Except returns a set with the same templates in which the named buckets have policies of their own, too. It returns s
// if that is so already. Otherwise the set that it returns has the given version.
func (s *Templates) Except(version int64, names []string) (*Templates, error) {
	missing := func(key string) bool { return s.Of(key) != nil }
	if !slices.ContainsFunc(names, missing) {
		return s, nil
	}
	list := make([]Template, len(s.list))
	for i, r := range s.list {
		list[i] = r.Template
	}
	return NewTemplates(version, list, append(s.Plain(), names...))
}

// SameAs reports whether both sets have the same templates, whatever their versions are.
func (s *Templates) SameAs(o *Templates) bool {
	if len(s.All()) != len(o.All()) || !maps.Equal(s.named(), o.named()) {
		return false
	}
	for i, r := range s.All() {
		p := o.list[i]
		if r.Prefix != p.Prefix || r.Enforce != p.Enforce || r.MaxKeys != p.MaxKeys || !r.Policy.Equal(p.Policy) {
			return false
		}
	}
	return true
}

// Plain returns the names of the buckets that have policies of their own, though a template matches them.
func (s *Templates) Plain() []string { return slices.Sorted(maps.Keys(s.named())) }

// named returns the buckets with policies of their own.
func (s *Templates) named() map[string]bool {
	if s == nil {
		return nil
	}
	return s.plain
}

// templatesText is the form of a set in Redis.
type templatesText struct {
	Version   int64          `json:"version"`
	Templates []templateText `json:"templates"`
	Plain     []string       `json:"plain,omitempty"`
}

type templateText struct {
	Prefix  string `json:"prefix"`
	Enforce string `json:"enforce"`
	Terms   string `json:"terms"`
	MaxKeys int64  `json:"max_keys,omitempty"`
	// Schedule is the schedule of budgets. The terms have only a number that names it.
	Schedule *scheduleText `json:"schedule,omitempty"`
	Flows    *Flows        `json:"flows,omitempty"`
}

// Encode returns the text in which the set is published. Equal sets have equal texts.
func (s *Templates) Encode() string {
	text := templatesText{Version: s.Version(), Templates: []templateText{}}
	for _, r := range s.All() {
		text.Templates = append(text.Templates, templateText{r.Prefix, r.Enforce.String(), r.Text, r.MaxKeys,
			scheduleOf(r.Policy.Steps), r.Policy.Flows})
	}
	text.Plain = s.Plain()
	b, err := json.Marshal(text)
	if err != nil {
		panic(err) // texts and numbers always can be written
	}
	return string(b)
}

// DecodeTemplates reads what Encode wrote. The error is ErrTemplates.
func DecodeTemplates(s string) (*Templates, error) {
	var text templatesText
	if err := json.Unmarshal([]byte(s), &text); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTemplates, err)
	}
	list := make([]Template, len(text.Templates))
	for i, t := range text.Templates {
		terms, err := DecodeTerms(t.Terms)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrTemplates, err)
		}
		list[i] = Template{Prefix: t.Prefix, Policy: terms.Policy(), MaxKeys: t.MaxKeys}
		if t.Schedule != nil {
			list[i].Policy.Steps, err = t.Schedule.steps()
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrTemplates, err)
			}
			list[i].Policy.StepTokens = terms.Tokens
		}
		list[i].Policy.Flows = t.Flows
		switch t.Enforce {
		case EnforceLazy.String():
			list[i].Enforce = EnforceLazy
		case EnforceRefilled.String():
		default:
			return nil, fmt.Errorf("%w: enforce is %q", ErrTemplates, t.Enforce)
		}
	}
	set, err := NewTemplates(text.Version, list, text.Plain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTemplates, err)
	}
	return set, nil
}

// Policy returns the policy of terms, without a grant. The policy of stepped terms lacks the schedule, since the terms
// have only a number that names it.
func (t Terms) Policy() Policy {
	initial := t.Initial
	return Policy{
		Capacity: t.Capacity, Rate: t.Rate(), Interval: time.Duration(t.Interval) * time.Microsecond, Initial: &initial,
		OnLoss: t.OnLoss, OnRollback: t.OnRollback, CarryOver: t.CarryOver, Degraded: t.Degraded, Strict: t.Strict,
		Shadow: t.Shadow,
	}
}
