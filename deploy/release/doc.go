// Package release tests the tools of releases. The workflows must be valid. "go install …@version" must build the
// programs from the module in the form in which the module proxy serves it. The package holds only tests.
package release
