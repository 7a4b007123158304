// Package credential holds what proves a client's identity to Redis and etcd: passwords and TLS files.
//
// Secrets come from files or from the caller, and files are read again whenever they are needed, so that they can be
// rotated under a running process. A secret never shows in formatted output, logs or errors: types here print a mask in
// its place.
package credential
