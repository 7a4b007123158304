// Package compose tests the demo in this directory: its file is one of the
// Compose specification, what it mounts is there, Envoy's configuration is of
// Envoy's API, and the programs understand theirs. It starts no container.
package compose
