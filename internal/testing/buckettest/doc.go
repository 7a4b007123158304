// Package buckettest has the cases and random histories with which every implementation of a bucket is tested. The pure
// model in package policy and the Redis scripts in package lua run the same ones. The package is for tests only, and
// computes no expected results of its own: see package oracle.
package buckettest
