// Package buckettest holds the cases and random histories that every
// implementation of a bucket is tested with: the pure model in package policy
// and the Redis scripts in package lua run the same ones.
package buckettest
