// Package scale measures what it costs to keep very many buckets full: see README.md.
package scale
