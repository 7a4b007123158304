package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Shared is a part of the configuration that replicas read from one place, beside their files: YAML with a version and
// any of refill_interval, buckets, templates and pools. If its version is above the file's, what it has stands instead of
// the file's; otherwise the file counts.
type Shared struct {
	Source string // what to call it in a Problem
	Data   []byte // empty: there is none
}

// sharedFields are what all replicas agree on.
var sharedFields = []string{"version", "refill_interval", "buckets", "templates", "pools"}

// share lays what is shared over the tree of the file.
func (d *decoder) share(root *yaml.Node, s Shared) {
	if len(s.Data) == 0 {
		return
	}
	before := len(d.problems)
	shared := d.readTree(s.Data)
	for i := before; i < len(d.problems); i++ {
		d.problems[i].Source = s.Source
	}
	if shared == nil {
		return
	}
	d.from(shared, s.Source)
	seen := map[string]bool{}
	for i := 0; i+1 < len(shared.Content); i += 2 {
		name := shared.Content[i]
		switch {
		case !slices.Contains(sharedFields, name.Value):
			d.report(name, brief(name.Value), "it is in each replica's file alone: what is shared are "+strings.Join(sharedFields, ", "))
		case seen[name.Value]:
			d.report(name, name.Value, "it is there twice")
		}
		seen[name.Value] = true
	}
	version := value{d: d, node: child(shared, "version"), parent: shared, path: "version"}
	if !version.present() {
		version.bad("it is required: want a version above the file's")
	}
	n, ok := version.integer(0, maxVersion)
	if !ok || len(d.problems) > before || n <= plainVersion(root) {
		return
	}
	for i := 0; i+1 < len(shared.Content); i += 2 {
		d.set(root, shared.Content[i].Value, shared.Content[i+1], s.Source)
	}
}

// from notes that a node and all below it are written in the source.
func (d *decoder) from(n *yaml.Node, source string) {
	d.files[n] = source
	for _, c := range n.Content {
		d.from(c, source)
	}
}

// plainVersion is the version in a tree; 0 if it has none that is right, which is reported later.
func plainVersion(root *yaml.Node) int64 {
	if v := child(root, "version"); v != nil {
		if n, err := strconv.ParseInt(v.Value, 10, 64); err == nil {
			return n
		}
	}
	return 0
}

// line tells where a value is from, for messages about another one.
func (v value) line() string {
	if source, ok := v.d.sources[v.node]; ok {
		return "in " + source
	}
	if source, ok := v.d.files[v.node]; ok {
		return fmt.Sprintf("on line %d of %s", v.node.Line, source)
	}
	return fmt.Sprintf("on line %d", v.node.Line)
}
