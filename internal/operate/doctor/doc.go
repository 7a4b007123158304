// Package doctor checks the servers on which a refiller depends. It checks whether Redis and etcd answer, whether Redis
// runs the scripts and keeps their writes, and which rights the users need. It is not for watching a running
// deployment: metrics and alerts do that. It changes only buckets of its own, whose names begin with refiller:doctor.
// It deletes them if it has the right.
package doctor
