// Package credential has the passwords and TLS files with which a client proves its identity to Redis and etcd. It does
// not connect to them: see packages redisconn and etcdconn.
//
// Secrets come from files or from the caller, and files are read again whenever they are needed, so that they can be
// rotated under a running process. A secret never shows in formatted output, logs or errors: types here print a mask in
// its place.
package credential
