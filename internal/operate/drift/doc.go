// Package drift compares a configuration with the policies in force in Redis and etcd, and lists the differences. It
// changes nothing.
//
// The policies in force are those that Redis stores with the buckets, the templates that are published there, and the
// pools in etcd. A policy is replaced only under a higher version. So a difference under the same or a lower version is
// a conflict, which no refiller resolves. Redis has only the last and the next instant of a schedule. If two schedules
// have the same two instants, no difference is found.
package drift
