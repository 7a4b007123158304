// Package k8s tests the manifests in this directory and the chart in ../helm. Every overlay renders, and so does the
// chart with each of its sets of values. Equivalent overlays and values render the same objects. The objects decode
// strictly against the Kubernetes API types, meet the restricted Pod Security level, and refer to no missing object.
// The package holds only tests.
package k8s
