// Package replica puts one refiller replica together from its configuration:
// the connection to Redis, the refill loop, the election if there is one, and
// the admin server. It owns all of their goroutines.
package replica
