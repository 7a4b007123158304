// Package apiserver applies the manifests, the chart and the commands of the tutorial to a real API server of
// Kubernetes, strictly: with etcd, and without controllers or nodes, so that objects are checked and stored, and no
// pod runs. It holds tests only; `make test-apiserver` builds the programs, which takes a while the first time.
package apiserver
