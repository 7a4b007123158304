// Package flows is a suite: one bucket on a real Redis server that real replicas of "refiller run" divide among the
// flows of real clients.
//
// "make flows" runs every row and prints what each kind of flow got. "go test ./test/flows" runs the rows that take
// little time.
package flows
