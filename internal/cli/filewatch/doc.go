// Package filewatch tells when the content of a file has changed, however it
// was changed: written in place, replaced by a rename, or, as Kubernetes updates
// a mounted ConfigMap, by a symbolic link above it that now points elsewhere.
//
// It watches directories, not the file, since a replaced file takes its watch
// with it, and compares contents, since many events change nothing. A slow poll
// stands behind the events: file systems such as NFS send none, and a kernel
// may run out of watches.
package filewatch
