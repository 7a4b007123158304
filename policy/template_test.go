package policy_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/policy"
)

func template(prefix string) policy.Template {
	return policy.Template{Prefix: prefix, Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(1),
		Interval: time.Second}}
}

func templates(t require.TestingT, plain []string, prefixes ...string) *policy.Templates {
	list := make([]policy.Template, len(prefixes))
	for i, p := range prefixes {
		list[i] = template(p)
	}
	set, err := policy.NewTemplates(7, list, plain)
	require.NoError(t, err)
	return set
}

func TestSetsWithTheSameTemplatesAreTheSame(t *testing.T) {
	t.Parallel()
	set := templates(t, []string{"user:root", "elsewhere"}, "user:", "order:", "tenant:*:api")
	require.Equal(t, set.Encode(), templates(t, []string{"user:root"}, "tenant:*:api", "order:", "user:").Encode(),
		"the order of templates makes no difference")
	later, err := policy.NewTemplates(8, []policy.Template{template("order:"), template("user:"),
		template("tenant:*:api")}, []string{"user:root"})
	require.NoError(t, err)
	require.True(t, set.SameAs(later))
	require.False(t, set.Equal(later))
	require.False(t, set.SameAs(templates(t, nil, "user:", "order:", "tenant:*:api")))
	require.False(t, set.SameAs(templates(t, []string{"user:root"}, "user:", "order:")))
	other := template("order:")
	other.Policy.Capacity++
	changed, err := policy.NewTemplates(7, []policy.Template{other, template("user:"), template("tenant:*:api")},
		[]string{"user:root"})
	require.NoError(t, err)
	require.False(t, set.SameAs(changed))

	_, err = policy.NewTemplates(policy.OwnEpoch, nil, nil)
	require.ErrorIs(t, err, policy.ErrTemplates, "versions from OwnEpoch on are reserved for single keys")
	require.True(t, policy.Fence{Epoch: policy.OwnEpoch}.Own())
	require.False(t, policy.Fence{Epoch: policy.OwnEpoch - 1}.Own())
}

// Buckets that get policies of their own are added to a set, under another version. If the set has them all, it stays.
func TestASetExceptForSomeBuckets(t *testing.T) {
	t.Parallel()
	set := templates(t, []string{"user:root"}, "tenant:*:api", "user:")
	same, err := set.Except(9, []string{"user:root", "order:1"})
	require.NoError(t, err)
	require.Same(t, set, same)
	more, err := set.Except(9, []string{"user:1", "order:1"})
	require.NoError(t, err)
	require.EqualValues(t, 9, more.Version())
	require.Equal(t, []string{"user:1", "user:root"}, more.Plain())
	require.Equal(t, policy.Fence{Epoch: 9}, more.Of("user:2").Terms.Fence)
	require.False(t, set.SameAs(more))
	all, err := templates(t, []string{"user:1", "user:root"}, "tenant:*:api", "user:").Except(9, nil)
	require.NoError(t, err)
	require.True(t, all.SameAs(more))
	none, err := (*policy.Templates)(nil).Except(9, []string{"user:1"})
	require.NoError(t, err)
	require.Nil(t, none)
}

func TestTheMostSpecificTemplateCounts(t *testing.T) {
	t.Parallel()
	set := templates(t, []string{"user:root", "elsewhere"}, "", "user:", "user:vip:", "tenant:*:api", "tenant:*",
		"tenant:", "tenant:7:api", "a:*:c:*:e")
	for key, want := range map[string]string{
		"user:1": "user:", "user:": "user:", "users": "", "x": "", "user:vip:1": "user:vip:", "user:vip": "user:",
		"tenant:1:api": "tenant:*:api", "tenant:1:api/v2": "tenant:*:api", "tenant::api": "tenant:", "tenant:": "tenant:",
		"tenant:1":     "tenant:*",
		"tenant:7:api": "tenant:7:api", "tenant:7:ap": "tenant:*", "a:b:c:d:e": "a:*:c:*:e", "a:b:c::e": "", "a:b:x:d:e": "",
	} {
		r := set.Of(key)
		require.NotNil(t, r, key)
		require.Equal(t, want, r.Prefix, key)
	}
	require.Nil(t, set.Of("user:root"), "a bucket with a policy of its own has no template")
	require.Nil(t, templates(t, nil, "user:").Of("order:1"))
	require.Nil(t, (*policy.Templates)(nil).Of("user:1"))
	require.EqualValues(t, 7, set.Version())
	require.Equal(t, policy.Fence{Epoch: 7}, set.Of("user:1").Terms.Fence)
}

// A lazy bucket is credited for the time since its last take, so its capacity may be below the tokens of two refill
// intervals.
func TestALazyTemplateHasNoRefillInterval(t *testing.T) {
	t.Parallel()
	for name, burst := range map[string]policy.Template{
		"redis_rate.Limit{Rate: 1000, Burst: 100}": {Policy: policy.Policy{Capacity: 100, Rate: policy.PerSecond(1000)}},
		"below a millisecond's tokens":             {Policy: policy.Policy{Capacity: 1, Rate: policy.PerSecond(10_000)}},
	} {
		var wrong *policy.FieldError
		require.ErrorAs(t, burst.Validate(), &wrong, name)
		require.Equal(t, "capacity", wrong.Field, name)
		require.Contains(t, wrong.Msg, "two refill intervals", name)
		burst.Enforce = policy.EnforceLazy
		require.NoError(t, burst.Validate(), name)
		set, err := policy.NewTemplates(1, []policy.Template{burst}, nil)
		require.NoError(t, err, name)
		published, err := policy.DecodeTemplates(set.Encode())
		require.NoError(t, err, name)
		require.True(t, set.Equal(published), name)
	}
}

// match reports whether a prefix matches a key. It is slow and simple: it tries every length for every star.
func match(prefix, key string) bool {
	head, tail, starred := strings.Cut(prefix, "*")
	if !strings.HasPrefix(key, head) {
		return false
	}
	if !starred {
		return true
	}
	rest := key[len(head):]
	for n := 1; n <= len(rest) && rest[n-1] != ':'; n++ {
		ended := n == len(rest) || rest[n] == ':'
		if tail == "" || ended && match(tail, rest[n:]) {
			return true
		}
	}
	return false
}

// Templates are refused if a key exists for which it is ambiguous which one applies, and only then.
func TestAmbiguousTemplatesAreRefused(t *testing.T) {
	t.Parallel()
	var keys []string
	var spell func(string)
	spell = func(s string) {
		keys = append(keys, s)
		if len(s) < 7 {
			for _, c := range "ab:" {
				spell(s + string(c))
			}
		}
	}
	spell("")
	segment := rapid.SampledFrom([]string{"", "a", "b", "ab", "*", "*"})
	rapid.Check(t, func(t *rapid.T) {
		// The names are short enough that the keys above distinguish any two of them.
		draw := func(name string) string {
			segments := rapid.SliceOfN(segment, 1, 3).Filter(func(s []string) bool { return len(strings.Join(s, ":")) <= 5 })
			return strings.Join(segments.Draw(t, name), ":")
		}
		a, b := draw("a"), draw("b")
		both := false
		onlyA := false
		onlyB := false
		for _, k := range keys {
			ma, mb := match(a, k), match(b, k)
			both = both || ma && mb
			onlyA = onlyA || ma && !mb
			onlyB = onlyB || mb && !ma
		}
		set, err := policy.NewTemplates(1, []policy.Template{template(a), template(b)}, nil)
		if both && onlyA == onlyB {
			require.ErrorIs(t, err, policy.ErrPolicy, "%q and %q", a, b)
			return
		}
		require.NoError(t, err, "%q and %q", a, b)
		for _, k := range keys {
			want := ""
			switch ma, mb := match(a, k), match(b, k); {
			case ma && (!mb || onlyB):
				want = a
			case mb:
				want = b
			default:
				require.Nil(t, set.Of(k), "%q: %q and %q", k, a, b)
				continue
			}
			require.Equal(t, want, set.Of(k).Prefix, "%q: %q and %q", k, a, b)
		}
	})
}

func TestTemplatesAreChecked(t *testing.T) {
	t.Parallel()
	with := func(change func(*policy.Template)) policy.Template {
		p := template("user:")
		change(&p)
		return p
	}
	ten := int64(10)
	for want, bad := range map[string]policy.Template{
		"on_loss":  with(func(p *policy.Template) { p.Policy.OnLoss = policy.LossFull }),
		"prefix":   template("user:*x"),
		"rate":     with(func(p *policy.Template) { p.Policy.Rate = policy.Rate{} }),
		"capacity": with(func(p *policy.Template) { p.Policy.Capacity = 1 }),
		"enforce":  with(func(p *policy.Template) { p.Enforce = 2 }),
		"max_keys": with(func(p *policy.Template) { p.MaxKeys = -1 }),
		"initial":  with(func(p *policy.Template) { p.Policy.Initial = &ten }),
	} {
		_, err := policy.NewTemplates(1, []policy.Template{template("ok:"), bad}, nil)
		var at *policy.TemplateError
		var field *policy.FieldError
		require.ErrorAs(t, err, &at, want)
		require.Equal(t, 1, at.At)
		require.ErrorAs(t, err, &field, want)
		require.Equal(t, want, field.Field)
	}
	require.NoError(t, with(func(p *policy.Template) { p.Policy.Initial = &p.Policy.Capacity }).Validate())
	lazy := with(func(p *policy.Template) { p.Enforce, p.Policy.Initial = policy.EnforceLazy, &ten })
	require.ErrorContains(t, lazy.Validate(), "initial")
	lazy = with(func(p *policy.Template) { p.Enforce, p.MaxKeys = policy.EnforceLazy, 5 })
	require.ErrorContains(t, lazy.Validate(), "only with enforce: refilled")
	lazy = with(func(p *policy.Template) {
		p.Enforce = policy.EnforceLazy
		p.Policy.Capacity = 1 << 30
		p.Policy.Rate = policy.Rate{Tokens: 1, Per: time.Hour}
	})
	require.ErrorContains(t, lazy.Validate(), "a lazy bucket holds at most")
	_, err := policy.NewTemplates(1, make([]policy.Template, policy.MaxTemplates+1), nil)
	require.ErrorIs(t, err, policy.ErrTemplates)
	plain := make([]string, policy.MaxPlain+1)
	for i := range plain {
		plain[i] = strings.Repeat("x", i)
	}
	_, err = policy.NewTemplates(1, []policy.Template{template("")}, plain)
	require.ErrorIs(t, err, policy.ErrTemplates)
}

func TestPublishedTemplatesReadBackTheSame(t *testing.T) {
	t.Parallel()
	vip := template("user:vip:")
	vip.Enforce = policy.EnforceLazy
	capped := template("user:")
	capped.MaxKeys = 1000
	set, err := policy.NewTemplates(3, []policy.Template{capped, vip}, []string{"user:b", "user:a", "other"})
	require.NoError(t, err)
	back, err := policy.DecodeTemplates(set.Encode())
	require.NoError(t, err)
	require.Equal(t, set.Encode(), back.Encode())
	require.True(t, set.Equal(back))
	require.Equal(t, policy.EnforceLazy, back.Of("user:vip:1").Enforce)
	require.EqualValues(t, 1000, back.Of("user:1").MaxKeys)
	require.Equal(t, set.Of("user:1").Text, back.Of("user:1").Text)
	require.Nil(t, back.Of("user:a"))
	require.True(t, (*policy.Templates)(nil).Equal(nil))
	require.False(t, set.Equal(nil))
	for _, bad := range []string{"", "{", `{"templates":[{"prefix":"a","enforce":"lazy","terms":"1"}]}`,
		strings.Replace(set.Encode(), `"lazy"`, `"maybe"`, 1), strings.Replace(set.Encode(), "user:vip:", "user:", 1)} {
		_, err := policy.DecodeTemplates(bad)
		require.ErrorIs(t, err, policy.ErrTemplates, bad)
	}
}

func TestAnOverrideChangesCapacityAndRate(t *testing.T) {
	t.Parallel()
	base := template("user:")
	o, err := base.With(policy.Override{Capacity: 600})
	require.NoError(t, err)
	require.EqualValues(t, 600, o.Policy.Terms(policy.Fence{}).Initial, "a new bucket is full")
	require.Equal(t, base.Policy.Rate, o.Policy.Rate)
	base.Policy.Initial = &base.Policy.Capacity
	o, err = base.With(policy.Override{Capacity: 30, Rate: policy.PerSecond(2)})
	require.NoError(t, err)
	require.EqualValues(t, 30, o.Policy.Terms(policy.Fence{}).Initial)
	require.EqualValues(t, 60, *base.Policy.Initial)
	_, err = base.With(policy.Override{Rate: policy.PerSecond(1000)})
	var field *policy.FieldError
	require.True(t, errors.As(err, &field), "%v", err)
	require.Equal(t, "capacity", field.Field)
}
