// Command bench compares the consumer SDK with other rate limiters, with bare Redis commands, and with an in-process
// limiter. It starts a local Redis for that.
//
//	go run . [-rounds N] [-time D] [-workload hot,many,denied,far,stalled]
//	         [-goroutines 1,64] [-only REGEXP] [-json FILE] [-chart FILE]
//
// # Workloads
//
//   - hot: all goroutines take from one key that always has tokens.
//   - many: each goroutine takes from 10,000 such keys in turn, in a different order.
//   - denied: all goroutines take from one key that has no tokens.
//   - far: like many, but a round trip to the server takes 20 ms longer. Only some
//     contenders run it.
//   - stalled: a process is stopped part of the time. Its 20 goroutines take from
//     100 keys, a hundred times a second each. Only some contenders run it.
//
// Every contender answers single takes with its own defaults. There is one exception: go-redisstore gets a pool that
// keeps its connections. By default, a take of fetch has a deadline of 50 ms, or of four round trips if these take
// longer. The other contenders have no deadline. Contenders that use go-redis get clients with the same options;
// go-zero makes its own client.
//
// # Measuring
//
// Within a round the contenders run one after the other, each for the given time. Before its run, a contender takes
// once from every key and then takes for half of the given time, so that caches and connections are warm. So the
// workload many is like a service whose keys have been in use for a while. Each round starts with another contender, so
// that other work of the machine affects all of them. The first round isn't counted. Figures are medians over the
// rounds. A ratio is the median of the ratios within each round.
//
// Only answered takes count. The table shows the other takes as errors. Client CPU is the processor time of this
// process (getrusage), including the benchmark itself. Redis CPU and commands are the server's own counts (INFO). A
// script counts as a command, and so does each command within it. For bytes per key, each of up to 1,000 buckets is
// taken from once. The figure is the MEMORY USAGE of all keys that exist then, divided by the number of buckets.
package main
