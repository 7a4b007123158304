// Package k8s tests the manifests in this directory and the chart in ../helm. Every overlay renders, and so does the
// chart with its sets of values. Equivalent overlays and values render the same objects. The result decodes strictly
// against the Kubernetes API types, meets the restricted Pod Security level, and refers to no missing object. It holds
// tests only.
package k8s
