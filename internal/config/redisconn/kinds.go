package redisconn

import (
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// DefaultURL is the address of programs that are given none.
const DefaultURL = "redis://127.0.0.1:6379/0"

// Kinds are those of the fields of Options.
var Kinds = fields.Credentials.And(fields.Kinds{
	"redis url":         urlKind(),
	"redis timeout":     fields.Duration(MinTimeout, MaxTimeout, 1),
	"redis connections": fields.Integer(1, MaxPoolSize),
})

// urlKind is an address, which is shown in no message, for it may hold a password. That is no place for a configuration
// file to hold one: see the package documentation.
func urlKind() fields.Kind {
	k := fields.Text(Forms, nil)
	k.Read = func(n *yaml.Node) (any, string) {
		if n.Kind != yaml.ScalarNode || n.Tag != "!!str" || n.Value == "" {
			return nil, "want text: " + Forms
		}
		u, err := ParseURL(n.Value)
		switch {
		case err != nil:
			return nil, strings.TrimPrefix(err.Error(), ErrURL.Error()+" ")
		case !u.Password.IsZero() && !fields.IsLaid(n):
			return nil, "a password has no place in this file: name its own file in password_file, " +
				"or put it in REFILLER_REDIS_PASSWORD"
		}
		return u, ""
	}
	return k
}

// Settle reports what is wrong with options that a Decoder has read at a path. An address with credentials brings those
// that count, before those that a layer below it has.
func (o *Options) Settle(d *fields.Decoder, at fields.Path) {
	if o.URL.Username != "" || !o.URL.Password.IsZero() {
		url := d.Layer(at.Field("url"))
		if d.Layer(at.Field("username")) < url {
			o.Username = ""
		}
		if d.Layer(at.Field("password_file")) < url {
			o.Password = credential.Password{}
		}
	}
	if d.Valid(at) {
		d.Check(at, o.Validate())
	}
}

// section is the part of a configuration that says how to reach Redis.
type section struct {
	Redis Options `yaml:"redis" env:"REDIS_"`
}

// Variables are those that say how to reach Redis; each but those of secrets is a flag of the programs too.
func Variables() []fields.Variable { return fields.New(Kinds, &section{}).Variables() }

// FromCommandLine reads options from the environment and from flags, which count more. Without an address it is
// DefaultURL. The error is fields.Problems.
func FromCommandLine(e fields.Environment, flags ...fields.Override) (Options, error) {
	var s section
	d := fields.New(Kinds, &s)
	d.Lay(fields.Override{Source: "default", Field: "redis.url", Value: DefaultURL})
	d.LayEnvironment(e)
	for _, f := range flags {
		d.Lay(f)
	}
	s.Redis.Settle(d, fields.Path{"redis"})
	var known []string
	for _, v := range d.Variables() {
		known = append(known, v.Name)
	}
	d.AddProblems(e.Misspelled(known, []string{fields.Prefix + "REDIS_"}))
	return s.Redis, d.Err()
}
