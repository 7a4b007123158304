// Package apiserver applies the manifests, the chart and the commands of the tutorial strictly to a real API server of
// Kubernetes. The server has etcd, but no controllers and no nodes. So objects are checked and stored, and no pod runs.
// It holds tests only; `make test-apiserver` builds the programs, which takes a while the first time.
package apiserver
