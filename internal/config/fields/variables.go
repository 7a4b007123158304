package fields

import (
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Prefix begins the names of all environment variables.
const Prefix = "REFILLER_"

// Environment has the values of a process's environment variables by name. An empty value counts as unset.
type Environment map[string]string

// EnvironmentOf converts the result of os.Environ.
func EnvironmentOf(environ []string) Environment {
	e := Environment{}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		e[name] = value
	}
	return e
}

// Variable is an environment variable that sets a field.
type Variable struct {
	Name   string
	Field  string // dotted path
	Secret bool   // it holds the secret itself, although the field is for the name of the secret's file
}

// Flag returns the name of the flag that sets the same field. It is empty for a secret, because other users of a
// machine can read command lines. The flags of addresses have short names.
func (v Variable) Flag() string {
	if v.Secret {
		return ""
	}
	name := strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(v.Name, Prefix)), "_", "-")
	return strings.TrimSuffix(strings.TrimSuffix(name, "-endpoints"), "-url")
}

// Variables returns the variables of all fields, in the order of the fields. If two set the same field, the later one
// has precedence.
func (d *Decoder) Variables() []Variable { return d.variables(d.into.Type(), Prefix, "") }

func (d *Decoder) variables(t reflect.Type, prefix, path string) []Variable {
	var list []Variable
	for _, f := range d.shape(t).fields {
		switch {
		case f.env == nil:
		case f.section() != nil:
			list = append(list, d.variables(f.section(), prefix+*f.env, path+f.name+".")...)
		default:
			list = append(list, Variable{Name: prefix + *f.env, Field: path + f.name})
		}
		if f.secret != nil {
			list = append(list, Variable{Name: prefix + *f.secret, Field: path + f.name, Secret: true})
		}
	}
	return list
}

// variable returns the name of the variable that sets a field, or "" if there is none. If secret is true, it returns
// the name of the variable that holds the secret itself.
func (d *Decoder) variable(at Path, secret bool) string {
	for _, v := range d.Variables() {
		if v.Field == at.String() && v.Secret == secret {
			return v.Name
		}
	}
	return ""
}

// AddEnvironment adds a layer for each variable that is set.
func (d *Decoder) AddEnvironment(e Environment) {
	for _, v := range d.Variables() {
		if value := e[v.Name]; value != "" {
			d.AddValue(Override{Source: v.Name, Field: v.Field, Value: value, Secret: v.Secret})
		}
	}
}

// services matches the names of the variables that Kubernetes sets for Services, such as one called refiller or
// refiller-redis.
var services = regexp.MustCompile(
	`_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// Misspelled reports variables that no program reads and that are probably misspelled. Their names are close to a known
// name, or they begin with one of the families, such as REFILLER_REDIS_.
func (e Environment) Misspelled(known, families []string) Problems {
	var problems Problems
	for _, name := range slices.Sorted(maps.Keys(e)) {
		if !strings.HasPrefix(name, Prefix) || e[name] == "" || slices.Contains(known, name) || services.MatchString(name) {
			continue
		}
		const unread = "no program reads this variable: "
		of := slices.IndexFunc(families, func(f string) bool { return strings.HasPrefix(name, f) })
		if near := Closest(name, known); near != "" {
			problems = append(problems, Problem{Source: name, Msg: unread + "did you mean " + near + "?"})
		} else if of >= 0 {
			others := slices.DeleteFunc(slices.Clone(known), func(k string) bool { return !strings.HasPrefix(k, families[of]) })
			problems = append(problems, Problem{Source: name, Msg: unread + "there are " + strings.Join(others, ", ")})
		}
	}
	return problems
}
