// Package scale measures the cost of keeping very many buckets full: see README.md. It holds measurements and tests
// only, and checks no promise about tokens: see package robustness.
package scale
