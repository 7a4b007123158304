// Package pools tests pools with real programs under random faults. Each region has a Redis, and refiller processes
// that reach an etcd with three members over slow and lossy links. The package holds tests only. Package pool tests the
// same faults in simulated time. It also has controls, which lack one mechanism and so break a bound.
//
//	make pools N=50           # random schedules; SEED=… repeats one
//	make pools N=5 LONG=true  # faults that outlast leases, such as a pause of 30 s
package pools
