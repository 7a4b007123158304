package k8s

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/yaml"
)

// free are the fields whose own fields may have any name.
var free = []string{"labels", "annotations", "matchLabels", "requests", "limits", "data", "pairs"}

// typos returns a YAML file once for each name of a field in it, with this name misspelled.
func typos(t *testing.T, text []byte) map[string]string {
	t.Helper()
	all := map[string]string{}
	var docs []*yaml.Node
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	for {
		var doc yaml.Node
		if d.Decode(&doc) != nil {
			break
		}
		docs = append(docs, &doc)
	}
	var walk func(n *yaml.Node, path string, chosen bool)
	walk = func(n *yaml.Node, path string, chosen bool) {
		switch n.Kind {
		case yaml.DocumentNode, yaml.SequenceNode:
			for i, c := range n.Content {
				walk(c, fmt.Sprintf("%s[%d]", path, i), false)
			}
		case yaml.MappingNode:
			for i := 0; i < len(n.Content); i += 2 {
				key := n.Content[i]
				at := path + "." + key.Value
				if !chosen {
					right := key.Value
					key.Value += "x"
					var out []string
					for _, doc := range docs {
						s, err := yaml.String(doc)
						require.NoError(t, err)
						out = append(out, s)
					}
					all[at] = strings.Join(out, "---\n")
					key.Value = right
				}
				// The selector of a Service, unlike others, is a map of labels.
				service := key.Value == "selector" && !slices.ContainsFunc(n.Content[i+1].Content,
					func(c *yaml.Node) bool { return strings.HasPrefix(c.Value, "match") })
				walk(n.Content[i+1], at, slices.Contains(free, key.Value) || service)
			}
		}
	}
	for _, doc := range docs {
		walk(doc, "", false)
	}
	return all
}

func TestATypoInAnyFieldIsFound(t *testing.T) {
	t.Parallel()
	fs := filesys.MakeFsInMemory()
	sources(t, func(path string, text []byte) { require.NoError(t, fs.WriteFile("/"+path, text)) })
	// every file is in one of them
	users := []string{"/overlays/dev", "/overlays/regions/eu-west-1", "/overlays/regions/us-east-1",
		"/overlays/example-app"}
	found := func(path, text string) bool {
		if decodeSource(path, []byte(text)) != nil {
			return true
		}
		require.NoError(t, fs.WriteFile("/"+path, []byte(text)))
		return slices.ContainsFunc(users, func(dir string) bool {
			_, err := load(fs, dir)
			return err != nil
		})
	}
	count := 0
	sources(t, func(path string, right []byte) {
		require.False(t, found(path, string(right)))
		if filepath.Base(path) == "config.yaml" { // the program checks it
			return
		}
		for at, wrong := range typos(t, right) {
			assert.True(t, found(path, wrong), "%s: the misspelled field %sx is accepted", path, at)
			count++
		}
		require.NoError(t, fs.WriteFile("/"+path, right))
	})
	require.Greater(t, count, 400)
}
