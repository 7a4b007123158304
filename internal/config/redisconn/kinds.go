package redisconn

import (
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// DefaultURL is the address that programs use if none is given.
const DefaultURL = "redis://127.0.0.1:6379/0"

// Kinds are the kinds of the values of Options.
var Kinds = fields.Credentials.And(fields.Kinds{
	"redis url":         urlKind(),
	"redis timeout":     fields.Duration(MinTimeout, MaxTimeout, 1),
	"redis connections": fields.Integer(1, MaxPoolSize),
})

// urlKind returns the kind of addresses. No message shows an address, because it may have a password. In a
// configuration file it must have none: see the package documentation.
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
		case !u.Password.IsZero() && !fields.IsOverride(n):
			return nil, "a password has no place in this file: name its own file in password_file, " +
				"or put it in REFILLER_REDIS_PASSWORD"
		}
		return u, ""
	}
	return k
}

// Settle reports the errors in options that a Decoder has read at a path. If an address has credentials, they replace
// the credentials of earlier layers.
func (o *Options) Settle(d *fields.Decoder, at fields.Path) {
	if o.URL.Username != "" || !o.URL.Password.IsZero() {
		url := d.LayerOf(at.Field("url"))
		if d.LayerOf(at.Field("username")) < url {
			o.Username = ""
		}
		if d.LayerOf(at.Field("password_file")) < url {
			o.Password = credential.Password{}
		}
	}
	if d.Valid(at) {
		d.Check(at, o.Validate())
	}
}

// section is the part of a configuration with the options for Redis.
type section struct {
	Redis Options `yaml:"redis" env:"REDIS_"`
}

// Variables returns the environment variables with the options for Redis. Each of them is also a flag of the programs,
// unless it holds a secret.
func Variables() []fields.Variable { return fields.New(Kinds, &section{}).Variables() }

// FromCommandLine reads options from the environment and from flags, which have precedence. The default address is
// DefaultURL. The error is fields.Problems.
func FromCommandLine(e fields.Environment, flags ...fields.Override) (Options, error) {
	var s section
	d := fields.New(Kinds, &s)
	d.AddValue(fields.Override{Source: "default", Field: "redis.url", Value: DefaultURL})
	d.AddEnvironment(e)
	for _, f := range flags {
		d.AddValue(f)
	}
	s.Redis.Settle(d, fields.Path{"redis"})
	var known []string
	for _, v := range d.Variables() {
		known = append(known, v.Name)
	}
	d.AddProblems(e.Misspelled(known, []string{fields.Prefix + "REDIS_"}))
	return s.Redis, d.Err()
}
