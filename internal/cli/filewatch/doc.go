// Package filewatch reports changes of the content of a file, however it was changed: written in place, replaced by a
// rename, or by a symbolic link above it that now leads elsewhere, as Kubernetes updates a mounted ConfigMap.
//
// It watches directories and not the file, since a replaced file loses its watch. It compares contents, since many
// events change nothing. In addition it polls slowly, because file systems such as NFS send no events, and a kernel may
// run out of watches.
package filewatch
