// Package buckettest has the cases and random histories with which every implementation of a bucket is tested. The
// model in package policy and the Redis scripts in package lua are tested with the same ones. The package is for tests
// only. It doesn't compute the expected results of histories: see packages policy and oracle.
package buckettest
