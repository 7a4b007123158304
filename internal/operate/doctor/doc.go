// Package doctor examines what a refiller depends on: whether Redis and etcd
// answer, whether Redis lets the scripts run and keeps what they write, and what
// rights they need. It changes nothing but a
// bucket of its own, refiller:doctor, which it deletes if it may.
package doctor
