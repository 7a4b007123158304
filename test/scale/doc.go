// Package scale measures the cost of refilling very many buckets: see README.md. It holds only measurements and tests.
// It doesn't check promises about tokens: see package robustness.
package scale
