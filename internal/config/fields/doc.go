// Package fields fills tagged structs from YAML, environment variables and flags. It reports all errors in these, each
// with its line. The package is not specific to refillers: package config has the structs and their kinds of values.
//
// A struct shows the structure of a file. Its fields have these tags:
//
//	yaml:"capacity"           the name of the field. It may have an option:
//	                          ",required": the field must be given
//	                          ",inline": the fields of an embedded struct are on the level of the other fields
//	                          ",key": the field holds the name under which a mapping has the struct
//	is:"tokens"               the Kind of a single value: the allowed values, and how they are read
//	default:"100ms"           the value of a field that isn't given, as a file would have it
//	env:"CA"                  the last part of the environment variable's name. The tag of a struct precedes the tags
//	                          of its fields. If it is PASSWORD_FILE, there is also a variable PASSWORD, which holds
//	                          the content of such a file
//
// The same tags describe the fields for a schema and a reference: see [Decoder.Describe].
package fields
