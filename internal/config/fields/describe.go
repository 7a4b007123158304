package fields

import "reflect"

// Field describes a field of a struct, for a schema and a reference.
type Field struct {
	Name     string
	Path     string // dotted; an item of a list is buckets[], and an item with a name is regions.NAME
	Kind     *Kind  // nil: a section or a list of sections
	Required bool
	Default  string
	List     bool   // it is a list of single values or of sections
	Keyed    bool   // it is a list of sections with names
	Env      string // its variable, or empty
	Secret   string // variable of the secret itself, or empty
	Type     string // the struct in Go that has the field, such as policy.Rate
	Go       string // the field in Go, whose comment describes it
	Fields   []Field
	Section  string // the struct in Go that has Fields
}

// Describe describes the fields of the struct.
func (d *Decoder) Describe() []Field { return d.describe(d.into.Type(), Prefix, "") }

func (d *Decoder) describe(t reflect.Type, prefix, path string) []Field {
	var list []Field
	for _, f := range d.shape(t).fields {
		out := Field{
			Name: f.name, Path: path + f.name, Kind: f.kind, Required: f.required, Default: f.initial,
			Type: f.doc[0], Go: f.doc[1], List: f.typ.Kind() == reflect.Slice,
		}
		if f.env != nil && f.kind != nil && prefix != "" {
			out.Env = prefix + *f.env
		}
		if f.secret != nil {
			out.Secret = prefix + *f.secret
		}
		section, below := f.section(), ""
		if f.env != nil {
			below = prefix + *f.env
		}
		at := out.Path + "."
		if f.kind == nil && out.List {
			section, at = f.typ.Elem(), out.Path+"[]."
			out.Keyed = d.shape(section).key != nil
			if out.Keyed {
				at = out.Path + ".NAME."
			}
		}
		if section != nil {
			out.Fields, out.Section = d.describe(section, below, at), section.String()
		}
		list = append(list, out)
	}
	return list
}
