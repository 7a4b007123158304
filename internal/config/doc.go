// Package config reads the configuration of a refiller from a YAML file. Environment variables and flags replace values
// of the file. The package doesn't put a configuration in force: package replica does.
//
// The type file shows the structure of a file. docs/configuration.md is made from it and describes every field. All
// problems are reported, not only the first one. Each is a [Problem] with its line and column, the field's path
// ("buckets[0].rate"), the value and what is allowed. Nothing is guessed or clamped. Unknown and repeated fields,
// values of another type (such as a number in place of text), a second document, and YAML's anchors, aliases, merge
// keys and tags are problems.
//
// A flag replaces a variable of the environment, and a variable replaces the file's value. All replicas must have the
// same version, buckets, pools and intervals. These are only in the file, or in a document that the replicas share: see
// [Shared].
//
// A configuration file holds no password, neither in a field nor in a URL. A password comes from a separate file or
// from the environment. A username or password that is given beside a URL replaces the one in the URL. A [Config] and
// its parts print with secrets masked, and no Problem shows a secret.
package config
