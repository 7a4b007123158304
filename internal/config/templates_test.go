package config

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

const templated = inForce + `templates:
  - {prefix: "user:", enforce: lazy, capacity: 60, rate: 1/s, interval: 2s, degraded: local, carry_over: reset, shadow: true}
  - {prefix: "", enforce: lazy, capacity: 5, rate: 10/m}
  - {prefix: "tenant:*:api", capacity: 5, rate: 10/m, initial: 5, interval: 2s, max_keys: 100, on_rollback: keep}
`

func TestTemplatesAreRead(t *testing.T) {
	t.Parallel()
	c := parsed(t, templated)
	require.EqualValues(t, 7, c.Templates.Version())
	user := c.Templates.Of("user:42")
	require.Equal(t, policy.Template{Prefix: "user:", Enforce: policy.EnforceLazy, Policy: policy.Policy{
		Capacity: 60, Rate: policy.PerSecond(1), Interval: time.Millisecond, Degraded: policy.DegradedLocal,
		CarryOver: policy.CarryReset, Shadow: true,
	}}, user.Template)
	five := int64(5)
	require.Equal(t, policy.Template{Prefix: "tenant:*:api", Enforce: policy.EnforceRefilled, MaxKeys: 100,
		Policy: policy.Policy{
			Capacity: 5, Rate: policy.Rate{Tokens: 10, Per: time.Minute}, Interval: 2 * time.Second, Initial: &five,
			OnRollback: policy.RollbackKeep,
		}}, c.Templates.Of("tenant:7:api").Template)
	require.Empty(t, c.Templates.Of("anything").Prefix)
	require.Nil(t, c.Templates.Of("a"), "a bucket has its own policy")
	require.Contains(t, c.Summary(), "3 buckets and 3 templates on ")

	require.Nil(t, parsed(t, inForce).Templates)
	none := parsed(t, inForce+"templates: []\n")
	require.NotNil(t, none.Templates)
	require.Empty(t, none.Templates.All())
	require.Empty(t, parsed(t, `redis: {url: "redis://127.0.0.1:6379/0"}`+"\n"+`templates: [{prefix: a, enforce: lazy, capacity: 60, rate: 1/s}]`).Buckets)
}

func TestATemplateHasASchedule(t *testing.T) {
	t.Parallel()
	c := parsed(t, inForce+`templates:
  - {prefix: "month:", cron: "0 0 1 * *", time_zone: Europe/Berlin, tokens: 2000000, capacity: 2000000, max_keys: 5}
  - {prefix: "day:", every: 24h, tokens: 500, capacity: 1000}
`)
	month := c.Templates.Of("month:1")
	require.Equal(t, "0 0 1 * * Europe/Berlin", month.Policy.Steps.String())
	require.EqualValues(t, 2_000_000, month.Policy.StepTokens)
	require.EqualValues(t, 5, month.MaxKeys)
	require.True(t, month.Terms.Budget())
	require.Equal(t, policy.Every(24*time.Hour), c.Templates.Of("day:1").Policy.Steps)
	published, err := policy.DecodeTemplates(c.Templates.Encode())
	require.NoError(t, err)
	require.True(t, c.Templates.Equal(published))
	require.Equal(t, month.Policy.Steps.Next(time.Unix(0, 0)), published.Of("month:1").Policy.Steps.Next(time.Unix(0, 0)))
}

func TestTemplatesChangeWithTheVersion(t *testing.T) {
	t.Parallel()
	edit := func(old, with string) Config {
		t.Helper()
		return parsed(t, replaced(t, templated, old, with))
	}
	old := parsed(t, templated)
	for name, next := range map[string]Config{
		"rate":                   edit("rate: 1/s", "rate: 2/s"),
		"prefix":                 edit(`prefix: "user:"`, `prefix: "users:"`),
		"a template fewer":       edit(`  - {prefix: "", enforce: lazy, capacity: 5, rate: 10/m}`, ""),
		"enforce":                edit("enforce: lazy, capacity: 60", "capacity: 60"),
		"none":                   edit(templated[len(inForce):], "templates: []\n"),
		"a bucket that it takes": edit("key: b", "key: d"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := old.To(next)
			require.ErrorContains(t, err, "version: 7 is in force already with other templates")
		})
	}
	change, err := old.To(parsed(t, replaced(t, replaced(t, templated, "version: 7", "version: 8"), "rate: 1/s",
		"rate: 2/s")))
	require.NoError(t, err)
	require.True(t, change.Templates)

	change, err = old.To(parsed(t, replaced(t, templated, "rate: 1/s", "rate: 60/m")))
	require.NoError(t, err)
	require.False(t, change.Applies(), "the rate is the same in other units")
	change, err = old.To(parsed(t, inForce))
	require.NoError(t, err)
	require.False(t, change.Applies(), "a file without templates changes none")
	change, err = parsed(t, inForce).To(old)
	require.NoError(t, err)
	require.True(t, change.Applies())
}
