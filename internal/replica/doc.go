// Package replica builds one refiller replica from its configuration: the connection to Redis, the refill loop, the
// election and the pools if there are any, and the admin server. It owns all of their goroutines. The rules of refills,
// elections and pools are in packages refill, election and pool.
package replica
