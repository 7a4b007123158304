// Command bench compares the consumer SDK with other rate limiters, with the bare
// commands that none can beat, and with an in-process limiter, on a local Redis
// that it starts.
//
//	go run . [-rounds N] [-time D] [-workload hot,many,denied,far,stalled]
//	         [-goroutines 1,64] [-only REGEXP] [-json FILE] [-chart FILE]
//
// # Workloads
//
//   - hot: all goroutines take from one key that always has tokens.
//   - many: each goroutine walks through 10,000 such keys in an order of its own.
//   - denied: all goroutines take from one key that has no tokens.
//   - far: like the workload many, but a round trip to the server takes 20 ms
//     longer, for some of the contenders.
//   - stalled: 20 goroutines of a process that is stopped part of the time take
//     from 100 keys, a hundred times a second each, for some of the contenders.
//
// Every contender answers single takes with its own defaults, save that fetch has
// a deadline of 100 ms, as the others have none, and go-redisstore a pool that keeps
// its connections. Those that use go-redis get clients with the same options, but
// go-zero makes its own.
//
// # Measuring
//
// Within a round the contenders run one after the other, each for the given time
// after a lead-in: a take of every key, and then half of that time, in which caches
// and connections warm up. So the workload of many keys is that of a service whose
// keys have been in use for a while. Rounds are repeated, and each starts with
// another contender, so that whatever else the machine does meets all of them. The
// first round isn't counted. Figures are medians over the rounds; a ratio is the
// median of the ratios within each round.
//
// Only takes that were answered count; the rest are errors, which the table shows.
// Client CPU is that of this process (getrusage), so it includes the harness;
// Redis CPU and commands are the server's own counts (INFO), in which a script
// and each command within it are commands. Bytes per key is MEMORY USAGE of all
// keys that one take of each of 1,000 buckets leaves behind.
package main
