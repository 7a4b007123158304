package k8s

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// refillers are the directories of refillers that users apply. kustomizations are all the directories that users apply.
var (
	refillers = []string{"base", "overlays/dev", "overlays/production", "overlays/regions/eu-west-1",
		"overlays/regions/us-east-1"}
	kustomizations = append([]string{"overlays/example-app"}, refillers...)
)

// render builds a kustomization from the file system. It returns the YAML of each object.
func render(fs filesys.FileSystem, dir string) ([][]byte, error) {
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(fs, dir)
	if err != nil {
		return nil, err
	}
	var docs [][]byte
	for _, r := range resources.Resources() {
		doc, err := r.AsYAML()
		if err != nil {
			return nil, err
		}
		docs = append(docs, doc)
	}
	return docs, nil
}

// decoder refuses unknown and repeated fields, and kinds that aren't used here.
var decoder = func() runtime.Decoder {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, policyv1.AddToScheme, networkingv1.AddToScheme, autoscalingv2.AddToScheme,
		batchv1.AddToScheme, monitoringv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			panic(err) // a duplicate type in a library
		}
	}
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
}()

// load renders and decodes a kustomization.
func load(fs filesys.FileSystem, dir string) ([]runtime.Object, error) {
	docs, err := render(fs, dir)
	if err != nil {
		return nil, err
	}
	var objects []runtime.Object
	for _, doc := range docs {
		o, _, err := decoder.Decode(doc, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("%w in\n%s", err, doc)
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// decodeSource decodes a file of this directory strictly. The file may have objects, patches that are parts of objects,
// and lists of JSON patches. The rendered objects are not enough for this check. If a patch misspells the field that
// names the elements of a list, kustomize drops the whole list.
func decodeSource(path string, text []byte) error {
	switch filepath.Base(path) {
	case "kustomization.yaml", "config.yaml": // kustomize and the program refuse unknown fields
		return nil
	}
	if strings.HasPrefix(strings.TrimSpace(string(text)), "- op:") {
		var patches []struct {
			Op, Path string
			Value    any
		}
		if err := yaml.UnmarshalStrict(text, &patches); err != nil {
			return err
		}
		for _, p := range patches {
			if p.Op == "" || p.Path == "" || p.Value == nil && p.Op != "remove" {
				return fmt.Errorf("%s: a patch lacks its op, path or value", path)
			}
		}
		return nil
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		if _, _, err := decoder.Decode([]byte(doc), nil, nil); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// sources calls visit for every YAML file of this directory.
func sources(t *testing.T, visit func(path string, text []byte)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		visit(path, text)
		return nil
	}))
}

// loadOf renders and decodes a kustomization's directory or the chart with a file of values.
func loadOf(name string) ([]runtime.Object, error) {
	if filepath.Ext(name) == ".yaml" {
		return loadChart(name)
	}
	return load(filesys.MakeFsOnDisk(), name)
}

// each runs a test for each of the directories and the files of values.
func each(t *testing.T, dirs []string, test func(t *testing.T, objects []runtime.Object)) {
	for _, dir := range dirs {
		t.Run(dir, func(t *testing.T) {
			t.Parallel()
			objects, err := loadOf(dir)
			require.NoError(t, err)
			test(t, objects)
		})
	}
}

func TestEveryKustomizationIsTested(t *testing.T) {
	t.Parallel()
	var found []string
	sources(t, func(path string, text []byte) {
		if filepath.Base(path) == "kustomization.yaml" && !strings.Contains(string(text), "\nkind: Component\n") {
			found = append(found, filepath.Dir(path))
		}
		require.NoError(t, decodeSource(path, text))
	})
	require.ElementsMatch(t, kustomizations, found)
}

// only returns the objects of a type.
func only[T runtime.Object](objects []runtime.Object) []T {
	var list []T
	for _, o := range objects {
		if t, ok := o.(T); ok {
			list = append(list, t)
		}
	}
	return list
}
