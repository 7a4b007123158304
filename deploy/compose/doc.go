// Package compose tests the demo in this directory. It checks that the demo's file meets the Compose specification and
// that the mounted files exist. It also checks that Envoy's configuration meets Envoy's API, and that the programs
// accept their configurations. It starts no container.
package compose
