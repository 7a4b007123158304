// Package k8s tests the manifests in this directory: every overlay renders, the
// result decodes strictly against the Kubernetes API types, meets the restricted
// Pod Security level, and refers to nothing that isn't there. It holds tests
// only.
package k8s
