// Package flows is a test suite for the division of a bucket among flows: real replicas of "refiller run" divide one
// bucket on a real Redis server among the flows of real clients. It holds tests only. The algorithm is tested in
// simulated time in package flow.
//
// "make flows" runs every row and prints how many tokens each kind of flow got. "go test ./test/flows" runs the short
// rows.
package flows
