// Package filewatch reports changes of the content of a file. It makes no difference how the file was changed. It may
// be written in place, or replaced by a rename. A symbolic link in its path may also get another target, as when
// Kubernetes updates a mounted ConfigMap.
//
// The package watches directories instead of the file, because a replaced file loses its watch. It compares contents,
// because many events change nothing. It also polls slowly, because file systems such as NFS send no events, and
// because a kernel may run out of watches. The package doesn't parse files: the caller reads them again after a change.
package filewatch
