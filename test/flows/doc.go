// Package flows tests the division of a bucket among flows. Real replicas of "refiller run" divide one bucket on a real
// Redis server among the flows of real clients. The package holds tests only. Package flow tests the algorithm in
// simulated time.
//
// "make flows" runs every row and prints how many tokens each kind of flow got. "go test ./test/flows" runs the short
// rows.
package flows
