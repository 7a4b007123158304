// Command bench compares the consumer SDK with other rate limiters, with the bare commands that no limiter can beat,
// and with an in-process limiter. It starts a local Redis for that.
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
// Every contender answers single takes with its own defaults, with two exceptions: fetch has a deadline of 100 ms,
// although the others have none, and go-redisstore gets a pool that keeps its connections. Contenders that use go-redis
// get clients with the same options; go-zero makes its own.
//
// # Measuring
//
// Within a round the contenders run one after the other, each for the given time. Before that, a contender takes once
// from every key and then runs for half of that time, so that caches and connections are warm. So the workload of many
// keys is like a service whose keys have been in use for a while. Each round starts with another contender, so that
// other work of the machine affects all of them. The first round isn't counted. Figures are medians over the rounds; a
// ratio is the median of the ratios within each round.
//
// Only answered takes count. The table shows the other takes as errors. Client CPU is that of this process (getrusage),
// including the benchmark itself. Redis CPU and commands are the server's own counts (INFO). A script and each command
// within it count as commands. Bytes per key is the MEMORY USAGE of all keys that exist after one take of each of 1,000
// buckets.
package main
