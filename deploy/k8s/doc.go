// Package k8s tests the manifests in this directory and the chart in ../helm:
// every overlay renders, and so does the chart with its sets of values; both
// render the same where they mean the same. The
// result decodes strictly against the Kubernetes API types, meets the restricted
// Pod Security level, and refers to nothing that isn't there. It holds tests
// only.
package k8s
