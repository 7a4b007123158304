package k8s

import (
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

const hook = "helm.sh/hook"

func isHook(o runtime.Object) bool {
	object, err := meta.Accessor(o)
	return err == nil && object.GetAnnotations()[hook] != ""
}

// withValues renders the chart with the values of ci/race-values.yaml and those of a text.
func withValues(t *testing.T, text string) ([]runtime.Object, error) {
	t.Helper()
	right, err := os.ReadFile(charts[0])
	require.NoError(t, err)
	values, err := loader.LoadValues(io.Reader(strings.NewReader(string(right) + text)))
	require.NoError(t, err)
	files, err := renderChart(values)
	if err != nil {
		return nil, err
	}
	return objectsOf(files)
}

// checksOf returns the pods of the chart's hooks.
func checksOf(objects []runtime.Object) map[string]corev1.PodTemplateSpec {
	all := map[string]corev1.PodTemplateSpec{}
	for _, j := range only[*batchv1.Job](objects) {
		all[j.Annotations[hook]] = j.Spec.Template
	}
	for _, p := range only[*corev1.Pod](objects) {
		all[p.Annotations[hook]] = corev1.PodTemplateSpec{ObjectMeta: p.ObjectMeta, Spec: p.Spec}
	}
	return all
}

func TestChecksRunBeforeAnUpgradeAndInHelmTest(t *testing.T) {
	t.Parallel()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	require.NoError(t, err)
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	for _, path := range charts {
		values, err := chartValues(path)
		require.NoError(t, err)
		files, err := renderChart(values)
		require.NoError(t, err)
		objects, err := objectsOf(files)
		require.NoError(t, err)
		refiller := refillerOf(t, objects).Spec.Template.Spec
		checks := checksOf(objects)
		require.ElementsMatch(t, []string{"pre-upgrade,pre-rollback", "test"}, slices.Collect(maps.Keys(checks)))
		for name, pod := range checks {
			result := policy.AggregateCheckResults(evaluator.EvaluatePod(level, &pod.ObjectMeta, &pod.Spec))
			require.True(t, result.Allowed, "%s: %s", name, result.ForbiddenDetail())
			require.False(t, *pod.Spec.AutomountServiceAccountToken)
			require.Equal(t, secretsOf(refiller), secretsOf(pod.Spec))
			for _, c := range pod.Spec.Containers {
				require.Equal(t, refiller.Containers[0].Image, c.Image)
				require.Equal(t, refiller.Containers[0].Env, c.Env)
				require.Equal(t, refiller.Containers[0].VolumeMounts, c.VolumeMounts)
				runsAgainstRedis(t, c, files["config.yaml"])
			}
			networks := only[*networkingv1.NetworkPolicy](objects)
			i := slices.IndexFunc(networks, func(n *networkingv1.NetworkPolicy) bool { return isHook(n) })
			for key, value := range networks[i].Spec.PodSelector.MatchLabels {
				require.Equal(t, value, pod.Labels[key], "no network policy lets %s reach Redis", name)
			}
			require.Equal(t, networks[slices.IndexFunc(networks, func(n *networkingv1.NetworkPolicy) bool {
				return n.Name == "refiller"
			})].Spec.Egress, networks[i].Spec.Egress)
		}
		require.Equal(t, configOf(t, objects, "refiller"), configOf(t, objects, "refiller-check"),
			"the hook checks the new configuration")
	}
}

// runsAgainstRedis checks that the program accepts the arguments of a check, and fails only at the address of Redis.
func runsAgainstRedis(t *testing.T, c corev1.Container, configMap string) {
	t.Helper()
	var object corev1.ConfigMap
	require.NoError(t, yaml.Unmarshal([]byte(configMap), &object))
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(object.Data["config.yaml"]), 0o600))
	args := []string{"--redis=nowhere"}
	for _, a := range c.Args {
		args = append(args, strings.Replace(a, "/etc/refiller/config.yaml", path, 1))
	}
	out, err := exec.CommandContext(t.Context(), imagetest.Program(t, "refiller"), args...).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "redis://host:port/db", args)
}

func secretsOf(pod corev1.PodSpec) []string {
	var names []string
	for _, v := range pod.Volumes {
		if v.Secret != nil {
			names = append(names, v.Secret.SecretName)
		}
	}
	return names
}

// configOf returns the configuration in a ConfigMap.
func configOf(t *testing.T, objects []runtime.Object, name string) map[string]any {
	t.Helper()
	var config map[string]any
	for _, c := range only[*corev1.ConfigMap](objects) {
		if c.Name == name {
			require.NoError(t, yaml.Unmarshal([]byte(c.Data["config.yaml"]), &config))
		}
	}
	require.NotEmpty(t, config, name)
	return config
}

func TestAnUpgradeIsCheckedUnlessValuesSayOtherwise(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"checkUpgrade: false", "existingConfigMap: mine"} {
		objects, err := withValues(t, text)
		require.NoError(t, err)
		require.Equal(t, []string{"test"}, slices.Collect(maps.Keys(checksOf(objects))), text)
	}
}

func TestTheVersionMayBeTheReleasesRevision(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]float64{
		"": 1, "versionFrom: release": 1, "versionFrom: release\nversionBase: 41": 42,
	} {
		objects, err := withValues(t, text)
		require.NoError(t, err)
		require.Equal(t, any(want), configOf(t, objects, "refiller")["version"], text)
	}
	_, err := withValues(t, "existingConfigMap: mine\nversionFrom: release")
	require.ErrorContains(t, err, "leave one of them out")
	values, err := chartValues(charts[2])
	require.NoError(t, err)
	values["versionFrom"] = "release"
	_, err = renderChart(values)
	require.ErrorContains(t, err, "config.pools_version")
}

// portsOf returns the ports that the network policy of a name opens to all addresses.
func portsOf(t *testing.T, name string, objects []runtime.Object) string {
	t.Helper()
	for _, p := range only[*networkingv1.NetworkPolicy](objects) {
		if p.Name != name {
			continue
		}
		var ports []string
		for _, rule := range p.Spec.Egress {
			for _, port := range rule.Ports {
				if rule.To == nil {
					ports = append(ports, port.Port.String())
				}
			}
		}
		return strings.Join(ports, " ")
	}
	require.Fail(t, "no network policy")
	return ""
}

func TestANetworkPolicyOpensThePortsOfTheConfiguration(t *testing.T) {
	t.Parallel()
	const variable = "extraEnv: [{name: REFILLER_REDIS_URL, valueFrom: {secretKeyRef: {name: redis, key: url}}}]\n"
	for text, want := range map[string]string{
		"":                                       "6379",
		"  redis: {url: 'redis://redis:6380/0'}": "6380",
		"  redis: {url: 'rediss://me@redis:6380/0?db=1'}":              "6380",
		"  redis: {url: 'redis://redis'}":                              "6379",
		"  redis: {url: 'redis://[::1]:7001/0'}":                       "7001",
		"  redis: {url: 'redis-cluster://a:7001,b:7002,c'}":            "7001 7002 6379",
		"  redis: {url: 'redis-sentinel://a:26380,b/mymaster/0'}":      "26380 26379 6379",
		"  redis: {url: 'unix:///run/redis.sock'}":                     "",
		"  election: {mode: etcd, endpoints: ['http://e:12379', f]}":   "6379 12379 2379",
		"  pool_registry: {endpoints: ['https://r:22379']}":            "6379 22379",
		"extraEnv: [{name: REFILLER_REDIS_URL, value: 'redis://r:7'}]": "7",
		"networkPolicy: {redisPorts: [6379, 6380]}":                    "6379 6380",
		variable + "networkPolicy: {redisPorts: [6390]}":               "6390",
	} {
		objects, err := withValues(t, text)
		require.NoError(t, err, text)
		require.Equal(t, want, portsOf(t, "refiller", objects), text)
	}
	for text, message := range map[string]string{
		variable:                              "networkPolicy.redisPorts: name the ports",
		"networkPolicy: {redisPorts: [6380]}": "networkPolicy.redisPorts lacks 6379",
		"  election: {mode: etcd}":            "networkPolicy.etcdPorts: name the ports",
		"  election: {endpoints: ['http://e:1']}\nnetworkPolicy: {etcdPorts: [2379]}": "networkPolicy.etcdPorts lacks 1",
	} {
		_, err := withValues(t, text)
		require.ErrorContains(t, err, message, text)
	}
}

// The sidecar may have another address of Redis than the refillers.
func TestTheSidecarsNetworkPolicyOpensThePortOfItsOwnAddress(t *testing.T) {
	t.Parallel()
	objects, err := withValues(t, "extraEnv: [{name: REFILLER_REDIS_URL, value: 'redis://r:7'}]\n"+
		"sidecar: {enabled: true, extraEnv: [{name: REFILLER_REDIS_URL, value: 'redis://r:8'}]}")
	require.NoError(t, err)
	require.Equal(t, "7", portsOf(t, "refiller", objects))
	require.Equal(t, "8", portsOf(t, "refiller-sidecar", objects))
}

func TestAnEmptyListOfPeersAllowsNone(t *testing.T) {
	t.Parallel()
	objects, err := withValues(t, "sidecar: {enabled: true}\nnetworkPolicy: {metricsFrom: [], consumersFrom: []}")
	require.NoError(t, err)
	policies := slices.DeleteFunc(only[*networkingv1.NetworkPolicy](objects), func(p *networkingv1.NetworkPolicy) bool {
		return isHook(p)
	})
	require.Len(t, policies, 2)
	for _, p := range policies {
		require.Empty(t, p.Spec.Ingress, fmt.Sprint(p.Name, ": a rule without peers admits every client"))
		require.Contains(t, p.Spec.PolicyTypes, networkingv1.PolicyTypeIngress)
	}
}
