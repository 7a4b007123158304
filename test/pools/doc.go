// Package pools tests pools on real parts: a Redis for each region, etcd of three
// members, and refiller processes that reach etcd over slow and lossy links, under
// random faults. The same faults in simulated time, and the controls that break
// the bound with one mechanism taken out, are in package pool.
//
//	make pools N=50           # random schedules; SEED=… repeats one
//	make pools N=5 LONG=true  # faults that outlast leases, such as a pause of 30 s
package pools
