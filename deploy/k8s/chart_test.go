package k8s

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

var write = flag.Bool("write", false, "write the chart's schema of values, and the component of alerts, anew")

const chartDir = "../helm/refiller"

// charts are the values with which the chart is tested.
var charts = []string{
	chartDir + "/ci/race-values.yaml",
	chartDir + "/ci/elected-values.yaml",
	chartDir + "/ci/pools-values.yaml",
}

func chartValues(path string) (map[string]any, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it is only read
	return loader.LoadValues(file)
}

// renderChart renders the chart as "helm install refiller" does, into one text for each file.
func renderChart(values map[string]any) (map[string]string, error) {
	return renderRelease("refiller", values)
}

func renderRelease(name string, values map[string]any) (map[string]string, error) {
	chart, err := loader.Load(chartDir)
	if err != nil {
		return nil, err
	}
	options := common.ReleaseOptions{Name: name, Namespace: "limits", Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(chart, values, options, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return nil, err
	}
	named := map[string]string{}
	for path, text := range files {
		if strings.Contains(text, "<no value>") {
			return nil, fmt.Errorf("%s has no value somewhere:\n%s", path, text)
		}
		named[filepath.Base(path)] = text
	}
	return named, nil
}

// loadChart renders the chart with a file of values and decodes its objects, without hooks.
func loadChart(path string) ([]runtime.Object, error) {
	values, err := chartValues(path)
	if err != nil {
		return nil, err
	}
	files, err := renderChart(values)
	if err != nil {
		return nil, err
	}
	objects, err := objectsOf(files)
	return slices.DeleteFunc(objects, isHook), err
}

// objectsOf decodes what the chart rendered.
func objectsOf(files map[string]string) ([]runtime.Object, error) {
	var objects []runtime.Object
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		for doc := range strings.SplitSeq("\n"+files[name], "\n---\n") {
			if strings.TrimSpace(doc) == "" {
				continue
			}
			o, _, err := decoder.Decode([]byte(doc), nil, nil)
			if err != nil {
				return nil, fmt.Errorf("%s: %w in\n%s", name, err, doc)
			}
			objects = append(objects, o)
		}
	}
	return objects, nil
}

func TestTheChartHasNoFindings(t *testing.T) {
	t.Parallel()
	found, err := filepath.Glob(chartDir + "/ci/*.yaml")
	require.NoError(t, err)
	require.ElementsMatch(t, charts, found)
	for _, path := range charts {
		values, err := chartValues(path)
		require.NoError(t, err)
		require.Empty(t, lint.RunAll(chartDir, values, "limits").Messages, path)
		files, err := renderChart(values)
		require.NoError(t, err)
		require.Contains(t, files["NOTES.txt"], "doctor --config")
	}
}

// general makes the objects of the chart and of kustomize comparable. It removes the parts that only Helm adds, and
// parses the configurations.
func general(t *testing.T, objects []runtime.Object) map[string]any {
	t.Helper()
	all := map[string]any{}
	for _, o := range objects {
		text, err := json.Marshal(o)
		require.NoError(t, err)
		var fields map[string]any
		require.NoError(t, json.Unmarshal(text, &fields))
		withoutHelm(fields)
		if data, ok := fields["data"].(map[string]any); ok {
			var config any
			require.NoError(t, yaml.Unmarshal([]byte(data["config.yaml"].(string)), &config))
			data["config.yaml"] = config
		}
		all[fmt.Sprint(fields["kind"], " ", fields["metadata"].(map[string]any)["name"])] = fields
	}
	return all
}

func withoutHelm(value any) {
	switch v := value.(type) {
	case map[string]any:
		for _, key := range []string{
			"helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by",
			"imagePullPolicy", "namespace",
		} {
			delete(v, key)
		}
		for _, child := range v {
			withoutHelm(child)
		}
	case []any:
		for _, child := range v {
			withoutHelm(child)
		}
	}
}

func TestTheChartRendersWhatTheBaseDoes(t *testing.T) {
	t.Parallel()
	base, err := load(filesys.MakeFsOnDisk(), "base")
	require.NoError(t, err)
	chart, err := loadChart(charts[0])
	require.NoError(t, err)
	require.Equal(t, general(t, base), general(t, chart))
}

// The overlay dev sets the addresses of etcd in variables, and the chart sets them in the configuration.
func TestTheChartOfAnElectionRendersWhatTheComponentDoes(t *testing.T) {
	t.Parallel()
	dev, err := load(filesys.MakeFsOnDisk(), "overlays/dev")
	require.NoError(t, err)
	chart, err := loadChart(charts[1])
	require.NoError(t, err)
	deployment := refillerOf(t, dev)
	env := &deployment.Spec.Template.Spec.Containers[0].Env
	*env = slices.DeleteFunc(*env, func(e corev1.EnvVar) bool {
		return e.Name == "REFILLER_ELECTION_MODE" || e.Name == "REFILLER_ETCD_ENDPOINTS"
	})
	require.Equal(t, general(t, []runtime.Object{deployment, only[*networkingv1.NetworkPolicy](dev)[0]}),
		general(t, []runtime.Object{refillerOf(t, chart), only[*networkingv1.NetworkPolicy](chart)[0]}))
}

// The chart's sidecar listens for other pods and ends slowly. Otherwise it is the same as the component's sidecar.
func TestTheChartsSidecarIsThatOfTheComponent(t *testing.T) {
	t.Parallel()
	app, err := load(filesys.MakeFsOnDisk(), "overlays/example-app")
	require.NoError(t, err)
	chart, err := loadChart(charts[2])
	require.NoError(t, err)
	want := only[*appsv1.Deployment](app)[0].Spec.Template.Spec.InitContainers[0]
	pod := podsOf(t, chart, "sidecar").Spec
	got := *pod.Containers[0].DeepCopy()

	for name, value := range map[string]string{
		"URL":           "rediss://redis.eu-west-1.example.com:6379/0",
		"PASSWORD_FILE": "/var/run/secrets/refiller/redis/password",
		"CA":            "/var/run/secrets/refiller/redis/ca.crt",
	} {
		require.Contains(t, got.Env, corev1.EnvVar{Name: "REFILLER_REDIS_" + name, Value: value})
	}
	require.Equal(t, "/var/run/secrets/refiller/redis", got.VolumeMounts[0].MountPath)
	require.Len(t, pod.Volumes, 1, "the sidecar mounts no secret of etcd")
	understands(t, got)

	for _, v := range want.Env {
		if v.Name != "REFILLER_REDIS_URL" {
			require.Contains(t, got.Env, v)
		}
	}
	require.Equal(t, pod.SecurityContext.RunAsUser, want.SecurityContext.RunAsUser)
	require.Equal(t, pod.SecurityContext.SeccompProfile, want.SecurityContext.SeccompProfile)
	require.Equal(t, want.Command, got.Command)
	for _, c := range []*corev1.Container{&want, &got} { // these fields are compared above, or must differ
		c.Args = nil
		c.Env = nil
		c.Ports = nil
		c.RestartPolicy = nil
		c.VolumeMounts = nil
		c.ImagePullPolicy = ""
		c.SecurityContext.RunAsNonRoot, c.SecurityContext.SeccompProfile = nil, nil
		c.SecurityContext.RunAsUser, c.SecurityContext.RunAsGroup = nil, nil
	}
	require.Equal(t, want, got)

	scaler := only[*autoscalingv2.HorizontalPodAutoscaler](chart)
	require.Len(t, scaler, 1)
	require.Equal(t, "refiller-sidecar", scaler[0].Spec.ScaleTargetRef.Name)
	for _, d := range only[*appsv1.Deployment](chart) {
		if d.Name == "refiller-sidecar" {
			require.Nil(t, d.Spec.Replicas, "an upgrade would undo what the autoscaler did")
		}
	}
}

func TestTheChartMountsTheSecretsThatTheOverlayDoes(t *testing.T) {
	t.Parallel()
	overlay, err := load(filesys.MakeFsOnDisk(), "overlays/regions/eu-west-1")
	require.NoError(t, err)
	chart, err := loadChart(charts[2])
	require.NoError(t, err)
	want, got := refillerOf(t, overlay).Spec.Template.Spec, refillerOf(t, chart).Spec.Template.Spec
	require.ElementsMatch(t, want.Volumes, got.Volumes)
	require.ElementsMatch(t, want.Containers[0].VolumeMounts, got.Containers[0].VolumeMounts)
	require.Contains(t, got.Containers[0].Env, corev1.EnvVar{Name: "OTEL_SERVICE_NAME", Value: "refiller"})
	for i, c := range want.TopologySpreadConstraints {
		require.Equal(t, c.WhenUnsatisfiable, got.TopologySpreadConstraints[i].WhenUnsatisfiable)
	}
}

func TestTheChartsRulesAndDashboardAreThoseOfMonitoring(t *testing.T) {
	t.Parallel()
	chart, err := loadChart(charts[2])
	require.NoError(t, err)
	text, err := os.ReadFile("../monitoring/alerts.yaml")
	require.NoError(t, err)
	var want monitoringv1.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict(text, &want))
	rules := only[*monitoringv1.PrometheusRule](chart)
	require.Len(t, rules, 1)
	require.Equal(t, want, rules[0].Spec)
	require.Equal(t, "prometheus", rules[0].Labels["release"])

	dashboard, err := os.ReadFile("../monitoring/dashboard.json")
	require.NoError(t, err)
	var found string
	for _, c := range only[*corev1.ConfigMap](chart) {
		if c.Labels["grafana_dashboard"] == "1" {
			found = c.Data["refiller.json"]
		}
	}
	require.JSONEq(t, string(dashboard), found)
}

// The component has a copy of the rules, because kustomize reads no file outside of a kustomization's directory.
func TestTheComponentsRulesAreThoseOfMonitoring(t *testing.T) {
	const path = "components/alerts/prometheusrule.yaml"
	rules, err := os.ReadFile("../monitoring/alerts.yaml")
	require.NoError(t, err)
	want := "# make config-docs writes it from deploy/monitoring/alerts.yaml.\napiVersion: monitoring.coreos.com/v1\n" +
		"kind: PrometheusRule\nmetadata:\n  name: refiller\n  labels: {app.kubernetes.io/name: refiller}\nspec:\n"
	for line := range strings.Lines(string(rules)) {
		if strings.TrimSpace(line) != "" {
			line = "  " + line
		}
		want += line
	}
	if *write {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
		return
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, want == string(text), `the file is old: "make config-docs" writes it`)
}

// schemaOfValues returns the schema of the chart's values, in which it replaces the schema of the configuration by the
// present one.
func schemaOfValues(t *testing.T, values []byte) []byte {
	t.Helper()
	text, err := os.ReadFile("../../internal/config/schema.json")
	require.NoError(t, err)
	var config, schema map[string]any
	require.NoError(t, json.Unmarshal(text, &config))
	require.NoError(t, json.Unmarshal(values, &schema))
	delete(config, "$schema")
	schema["then"] = map[string]any{"properties": map[string]any{"config": config}}
	out, err := json.MarshalIndent(schema, "", "  ")
	require.NoError(t, err)
	return append(out, '\n')
}

func TestTheSchemaOfValuesHoldsThatOfTheConfiguration(t *testing.T) {
	path := chartDir + "/values.schema.json"
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	want := schemaOfValues(t, text)
	if *write {
		require.NoError(t, os.WriteFile(path, want, 0o644))
		return
	}
	require.True(t, bytes.Equal(want, text), `the file is old: "make config-docs" writes it`)
}

func TestWrongValuesAreRefused(t *testing.T) {
	t.Parallel()
	right, err := os.ReadFile(charts[0])
	require.NoError(t, err)
	for name, c := range map[string]struct{ values, message string }{
		"no buckets": {"{}", "buckets"},
		"a readable password": {string(right) + "  redis: {url: 'redis://:secret@redis:6379/0'}",
			"config.redis.url has a password"},
		"etcd's readable password": {string(right) + "  election: {endpoints: ['http://me:secret@etcd:2379']}",
			"config.election.endpoints has a password"},
		"a revision and a version": {string(right) + "  version: 3\nversionFrom: release", "config.version has no meaning"},
		"unknown value":            {string(right) + "replica: 3", "replica"},
		"unknown field of config":  {strings.Replace(string(right), "buckets:", "bukets:", 1), "bukets"},
		"no replicas":              {string(right) + "replicas: 0", "replicas"},
		"another port":             {string(right) + "  listen: :8080", "config.listen"},
		"a misspelled secret":      {string(right) + "secrets: {reddis: x}", "reddis"},
		"a limit of memory":        {string(right) + "memoryLimit: 100Mi", "memoryLimit"},
		"a sidecar's wrong field":  {string(right) + "sidecar: {enable: true}", "enable"},
		"a limit with no name":     {string(right) + "sidecar: {limits: [{lazy: {}}]}", "name"},
		"a domain with no name":    {string(right) + "sidecar: {envoy: [{descriptors: []}]}", "domain"},
		"an age without a unit":    {string(right) + "sidecar: {maxConnectionAge: '5'}", "maxConnectionAge"},
		"a variable with no name":  {string(right) + "extraEnv: [{value: x}]", "extraEnv"},
		"a rate without a time":    {strings.Replace(string(right), "500/s", "'500'", 1), "rate"},
		"a bucket without its key": {strings.Replace(string(right), "key: checkout, ", "", 1), "key"},
	} {
		values, err := loader.LoadValues(io.Reader(strings.NewReader(c.values)))
		require.NoError(t, err, name)
		_, err = renderChart(values)
		require.ErrorContains(t, err, c.message, name)
	}
	// A user's own ConfigMap has the buckets, so the chart renders none.
	files, err := renderChart(map[string]any{"existingConfigMap": "mine"})
	require.NoError(t, err)
	require.Empty(t, strings.TrimSpace(files["config.yaml"]))
	require.Contains(t, files["deployment.yaml"], "configMap: {name: mine}")
}
