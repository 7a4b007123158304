// Package compose tests the demo in this directory: its file meets the Compose specification, the mounted files exist,
// Envoy's configuration meets Envoy's API, and the programs accept their configurations. It starts no container.
package compose
