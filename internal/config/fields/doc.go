// Package fields fills tagged structs from YAML, environment variables and flags. It reports all errors in these, each
// with its line. The package knows nothing of refillers: package config has the structs and their kinds of values.
//
// A struct shows the structure of a file. Its fields have these tags:
//
//	yaml:"capacity"           name; ",required" behind it: the field must be there; ",inline": an embedded struct's
//	                          fields are beside the others; ",key": the name that a mapping has for the struct
//	is:"tokens"               the Kind of a single value: what is allowed, and how it is read
//	default:"100ms"           value of a field that isn't there, as it would be written
//	env:"CA"                  last part of the environment variable; a struct's tag precedes those of its fields. Of
//	                          PASSWORD_FILE, the variable PASSWORD holds what would be in the file
//	help:"address of Redis"   the description of the flag for the same
//
// The same tags describe the fields for a schema and a reference: see [Decoder.Describe].
package fields
