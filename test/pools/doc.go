// Package pools tests pools with real programs under random faults: a Redis for each region, etcd with three members,
// and refiller processes that reach etcd over slow and lossy links. It holds tests only. The same faults in simulated
// time are in package pool, and so are the controls that break the bound because one mechanism is missing.
//
//	make pools N=50           # random schedules; SEED=… repeats one
//	make pools N=5 LONG=true  # faults that outlast leases, such as a pause of 30 s
package pools
