// Package release tests what releases are made with: that the workflows are
// sound, and that "go install …@version" builds the programs from the module as
// the proxy serves it. It holds tests only.
package release
