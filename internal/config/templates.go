package config

import (
	"errors"
	"fmt"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/policy"
)

// templates reads the set of templates; nil if the field isn't there. plain are the names of buckets that have policies of
// their own.
func templates(v value, version int64, interval time.Duration, plain []string) *policy.Templates {
	if !v.present() {
		return nil
	}
	before := len(v.d.problems)
	var list []policy.Template
	var items []object
	for _, item := range v.list() {
		sound := len(v.d.problems)
		if t, o := readTemplate(item, interval); len(v.d.problems) == sound {
			list, items = append(list, t), append(items, o)
		}
	}
	for {
		set, err := policy.NewTemplates(version, list, plain)
		if err == nil && len(v.d.problems) == before {
			return set
		}
		if err == nil {
			return nil
		}
		var wrong *policy.TemplateError
		if !errors.As(err, &wrong) {
			v.bad("%s", unwrapped(err, policy.ErrTemplates))
			return nil
		}
		items[wrong.At].wrong(wrong.Err)
		list = append(list[:wrong.At], list[wrong.At+1:]...) // and on to what else is wrong
		items = append(items[:wrong.At], items[wrong.At+1:]...)
	}
}

// readTemplate reads one template.
func readTemplate(v value, interval time.Duration) (policy.Template, object) {
	o := v.object([]string{"prefix", "enforce", "capacity", "rate", "initial", "interval", "max_keys",
		"on_loss", "on_rollback", "carry_over", "degraded", "shadow", "strict"})
	if v.node.Kind != yaml.MappingNode {
		return policy.Template{}, o
	}
	t := policy.Template{Prefix: prefix(o.field("prefix")), Policy: readPolicy(o, interval)}
	if !o.field("rate").present() {
		o.field("rate").bad("it is required: want tokens/time such as 1/s")
	}
	t.Policy.Rate, _ = readRate(o.field("rate"))
	t.Enforce = policy.Enforce(o.field("enforce").choice(policy.EnforceRefilled.String(), policy.EnforceLazy.String()))
	t.MaxKeys, _ = o.field("max_keys").integer(0, policy.MaxTokens)
	if t.Enforce == policy.EnforceLazy {
		t.Policy.Interval = policy.MinInterval // nobody refills: the tokens are there when they are due
	}
	return t, o
}

// prefix reads the prefix of a template, which may be empty but is there.
func prefix(v value) string {
	want := fmt.Sprintf("the beginning of the buckets' names, such as \"user:\" or \"tenant:*:api\", up to %d bytes; \"\" for all names", policy.MaxPrefix)
	if !v.present() {
		v.bad("it is required: want %s", want)
		return ""
	}
	if v.node.Kind == yaml.ScalarNode && v.node.Tag == "!!str" && v.node.Value == "" {
		return ""
	}
	s, _ := v.text(want)
	return s
}

// wrong reports what package policy finds wrong with a template.
func (o object) wrong(err error) {
	var field *policy.FieldError
	if errors.As(err, &field) {
		o.field(field.Field).bad("%s", oneLine(field.Msg))
		return
	}
	o.bad("%s", unwrapped(err, policy.ErrTemplates))
}
