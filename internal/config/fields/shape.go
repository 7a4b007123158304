package fields

import (
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// shape is the content of the tags of a struct.
type shape struct {
	fields   []field
	byName   map[string]int
	names    []string
	refused  map[string]string // names of fields that users may expect; the value is the reason why there is no such field
	key      *field            // the field that holds the name of the struct, if a mapping has one for it
	defaults reflect.Value     // a struct that has the default values
}

// field is a field of a struct.
type field struct {
	name        string
	kind        *Kind // nil: a struct, or a list of structs
	required    bool
	initial     string  // the default, as a file would have it
	env, secret *string // last parts of variables' names; for a section, their prefix for its fields
	index       []int
	typ         reflect.Type
	doc         [2]string // type and name in Go
}

// section returns the struct type of the field, or the one that the field points to. It returns nil for other fields.
func (f *field) section() reflect.Type {
	t := f.typ
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if f.kind != nil || t.Kind() != reflect.Struct {
		return nil
	}
	return t
}

// set sets a single value, or returns a description of the error.
func (f *field) set(v reflect.Value, from *yaml.Node) (wrong string) {
	read, wrong := f.kind.Read(from)
	if wrong != "" {
		return wrong
	}
	if v.Kind() == reflect.Pointer && reflect.TypeOf(read) != v.Type() {
		v.Set(reflect.New(v.Type().Elem()))
		v = v.Elem()
	}
	v.Set(reflect.ValueOf(read).Convert(v.Type()))
	return ""
}

// missing returns the message for a required field that is missing.
func (d *Decoder) missing(f *field, at Path) string {
	msg := "it is required"
	if v := d.variable(at, false); v != "" {
		msg += ", here or in " + v
	}
	if f.kind != nil {
		msg += ": want " + f.kind.Want
	}
	return msg
}

// unknown returns the message for a name that the struct doesn't have.
func (d *Decoder) unknown(s *shape, at Path) string {
	name := at[len(at)-1]
	if why := s.refused[name]; why != "" {
		return why
	}
	if number, known := s.byName[name+"_file"]; known && s.fields[number].secret != nil {
		return fmt.Sprintf("a password has no place in this file: name its own file in %s_file, or put it in %s",
			name, d.variable(at[:len(at)-1].Field(name+"_file"), true))
	}
	if near := Closest(name, s.names); near != "" {
		return "unknown field: did you mean " + near + "?"
	}
	return "unknown field: allowed are " + strings.Join(s.names, ", ")
}

// shape reads the tags of a struct. It panics if a tag is invalid, so that every test fails.
func (d *Decoder) shape(t reflect.Type) *shape {
	s := d.shapes[t]
	if s == nil {
		s = &shape{byName: map[string]int{}, refused: map[string]string{}, defaults: reflect.New(t).Elem()}
		d.shapes[t] = s
		d.addFields(s, t, nil, "")
	}
	return s
}

// addFields adds the fields of a struct to the shape. The struct may be embedded in that of the shape.
func (d *Decoder) addFields(s *shape, t reflect.Type, index []int, env string) {
	for i := range t.NumField() {
		sf := t.Field(i)
		tag, tagged := sf.Tag.Lookup("yaml")
		if !tagged {
			continue
		}
		name, option, _ := strings.Cut(tag, ",")
		at := append(index[:len(index):len(index)], i)
		if option == "refused" {
			s.refused[name] = d.kinds[sf.Tag.Get("is")].Want
			continue
		}
		if option == "inline" {
			d.addFields(s, sf.Type, at, env+sf.Tag.Get("env"))
			continue
		}
		f := field{name: name, required: option == "required", initial: sf.Tag.Get("default"), index: at, typ: sf.Type}
		f.doc = [2]string{t.String(), sf.Name}
		if part, ok := sf.Tag.Lookup("env"); ok {
			part = env + part
			f.env = &part
			if secret, isFile := strings.CutSuffix(part, "_FILE"); isFile {
				f.secret = &secret
			}
		}
		if is := sf.Tag.Get("is"); is != "" {
			kind, known := d.kinds[is]
			if !known {
				panic(fmt.Sprintf("fields: %s.%s: no kind %q", t, sf.Name, is))
			}
			f.kind = &kind
		}
		d.setDefault(s, &f)
		if option == "key" {
			s.key = &f
			continue
		}
		s.byName[name] = len(s.fields)
		s.names = append(s.names, name)
		s.fields = append(s.fields, f)
	}
}

// setDefault sets the field's default. If the field is a section, it sets the defaults of the section's fields.
func (d *Decoder) setDefault(s *shape, f *field) {
	switch v := s.defaults.FieldByIndex(f.index); {
	case f.initial != "":
		if wrong := f.set(v, overrideNode(f.initial, false)); wrong != "" {
			panic(fmt.Sprintf("fields: the default of %s: %s", f.name, wrong))
		}
	case f.section() != nil && v.Kind() == reflect.Struct:
		v.Set(d.shape(f.typ).defaults)
	}
}
