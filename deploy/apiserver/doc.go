// Package apiserver applies the manifests, the chart and the commands of the tutorial strictly to a real API server of
// Kubernetes. The server has etcd, but no controllers and no nodes. So it checks and stores objects, but no pod runs.
// The package holds only tests. `make test-apiserver` builds the programs, which is slow the first time.
package apiserver
