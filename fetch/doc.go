// Package fetch takes tokens from the buckets that refillers keep full.
package fetch
