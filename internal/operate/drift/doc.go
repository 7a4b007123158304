// Package drift finds what a configuration would change against what is in force in Redis and etcd.
//
// In force are the policies that Redis holds with the buckets, the templates that are published there, and the pools
// that etcd holds. A policy is only replaced under a higher version: a difference under the same or a lower one is a
// conflict, which no refiller resolves. Redis doesn't know at which instants a schedule's tokens fall due, only the
// last one and the next. If two schedules agree on these, no difference is found.
package drift
