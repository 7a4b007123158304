// Package doctor checks the servers on which a refiller depends: whether Redis and etcd answer, whether Redis runs the
// scripts and keeps their writes, and which rights the users need. It is not for watching a running deployment: metrics
// and alerts do that. It changes only a bucket of its own, refiller:doctor, which it deletes if it has the right.
package doctor
