// Package config reads the configuration of a refiller: a YAML file, over which the environment and flags are laid.
//
// The type file shows the file's shape; docs/configuration.md, made from it, describes every field. Every problem is
// reported, not the first one alone, each as a [Problem] with its line and column, the field's path
// ("buckets[0].rate"), the value and what is allowed. Nothing is guessed or clamped: unknown and repeated fields,
// values of another type (a number where text belongs, 1.5 where a whole number does), a second document, and YAML's
// anchors, aliases, merge keys and tags are problems.
//
// A flag beats the environment, and the environment the file. What all replicas must agree on (version, buckets, pools,
// intervals) is in the file alone, or in what they share: see [Shared].
//
// No file holds a password, in a field or in a URL: it comes from a file of its own or from the environment. A username
// or password beside a URL is used instead of the one in it. A [Config] and its parts print with secrets masked, and no
// Problem shows one.
package config
