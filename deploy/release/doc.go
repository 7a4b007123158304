// Package release tests the tools of releases: the workflows are valid, and "go install …@version" builds the programs
// from the module as the module proxy serves it. It holds tests only.
package release
