package k8s

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

// pods returns the templates of all pods.
func pods(objects []runtime.Object) map[string]corev1.PodTemplateSpec {
	all := map[string]corev1.PodTemplateSpec{}
	for _, d := range only[*appsv1.Deployment](objects) {
		all[d.Name] = d.Spec.Template
	}
	for _, s := range only[*appsv1.StatefulSet](objects) {
		all[s.Name] = s.Spec.Template
	}
	return all
}

// refillerOf returns the Deployment of the refillers.
func refillerOf(t *testing.T, objects []runtime.Object) *appsv1.Deployment {
	t.Helper()
	found := slices.DeleteFunc(only[*appsv1.Deployment](objects), func(d *appsv1.Deployment) bool {
		return d.Spec.Template.Labels["app.kubernetes.io/component"] != "refiller"
	})
	require.Len(t, found, 1)
	return found[0]
}

// podsOf returns the template of the pods of a component.
func podsOf(t *testing.T, objects []runtime.Object, component string) corev1.PodTemplateSpec {
	t.Helper()
	for _, pod := range pods(objects) {
		if pod.Labels["app.kubernetes.io/component"] == component {
			return pod
		}
	}
	require.Fail(t, "no pods of "+component)
	return corev1.PodTemplateSpec{}
}

func TestPodsMeetTheRestrictedLevel(t *testing.T) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	require.NoError(t, err)
	level := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	each(t, slices.Concat(kustomizations, charts), func(t *testing.T, objects []runtime.Object) {
		for name, pod := range pods(objects) {
			result := policy.AggregateCheckResults(evaluator.EvaluatePod(level, &pod.ObjectMeta, &pod.Spec))
			require.True(t, result.Allowed, "%s: %s", name, result.ForbiddenDetail())
			// The evaluation must find a mistake.
			bad := pod.Spec.DeepCopy()
			bad.Containers[0].SecurityContext.Capabilities = nil
			require.False(t, policy.AggregateCheckResults(evaluator.EvaluatePod(level, &pod.ObjectMeta, bad)).Allowed)
		}
	})
}

func TestPodsAreSoundAndPinned(t *testing.T) {
	each(t, slices.Concat(kustomizations, charts), func(t *testing.T, objects []runtime.Object) {
		require.NotEmpty(t, pods(objects))
		for name, pod := range pods(objects) {
			spec := pod.Spec
			require.NotNil(t, spec.AutomountServiceAccountToken, name)
			require.False(t, *spec.AutomountServiceAccountToken, "%s has a token", name)
			volumes := map[string]bool{}
			for _, v := range spec.Volumes {
				volumes[v.Name] = true
				if v.ConfigMap != nil {
					require.True(t, slices.ContainsFunc(only[*corev1.ConfigMap](objects),
						func(c *corev1.ConfigMap) bool { return c.Name == v.ConfigMap.Name }), v.ConfigMap.Name)
				}
			}
			for _, s := range only[*appsv1.StatefulSet](objects) {
				for _, c := range s.Spec.VolumeClaimTemplates {
					volumes[c.Name] = true
				}
			}
			for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
				_, tag, tagged := strings.Cut(c.Image, ":")
				require.True(t, tagged && tag != "latest", "%s: image %s is not pinned", name, c.Image)
				require.False(t, c.Resources.Requests.Cpu().IsZero(), name)
				require.False(t, c.Resources.Requests.Memory().IsZero(), name)
				require.False(t, c.Resources.Limits.Memory().IsZero(), name)
				require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem, name)
				for _, m := range c.VolumeMounts {
					require.True(t, volumes[m.Name], "%s mounts %s, which is no volume", name, m.Name)
					require.Empty(t, m.SubPath, "a subPath is never updated")
				}
				for _, p := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe, c.StartupProbe} {
					if p != nil && p.HTTPGet != nil {
						require.True(t, hasPort(c, p.HTTPGet.Port),
							"%s: its probe uses the unknown port %s", name, p.HTTPGet.Port.String())
					}
				}
				require.NotNil(t, c.ReadinessProbe, name)
				require.NotNil(t, c.LivenessProbe, name)
			}
		}
	})
}

func hasPort(c corev1.Container, port intstr.IntOrString) bool {
	return slices.ContainsFunc(c.Ports, func(p corev1.ContainerPort) bool {
		return p.Name == port.String() || p.ContainerPort == port.IntVal
	})
}

func TestTheRefillerRunsInThreeReplicasAndRollsWithoutAGap(t *testing.T) {
	each(t, slices.Concat(refillers, charts), func(t *testing.T, objects []runtime.Object) {
		d := refillerOf(t, objects)
		require.EqualValues(t, 3, *d.Spec.Replicas)
		require.Zero(t, d.Spec.Strategy.RollingUpdate.MaxUnavailable.IntValue())
		spec := d.Spec.Template.Spec
		require.EqualValues(t, 30, *spec.TerminationGracePeriodSeconds,
			"the docs and the test of the program expect 30 seconds")
		require.Len(t, spec.TopologySpreadConstraints, 2)
		for _, c := range spec.TopologySpreadConstraints {
			require.True(t, matches(t, c.LabelSelector, d.Spec.Template.Labels))
		}
		c := spec.Containers[0]
		require.Equal(t, "/livez", c.LivenessProbe.HTTPGet.Path)
		require.Equal(t, "/livez", c.StartupProbe.HTTPGet.Path)
		require.Equal(t, "/readyz", c.ReadinessProbe.HTTPGet.Path)
		require.Len(t, only[*corev1.ServiceAccount](objects), 1)
		require.Equal(t, spec.ServiceAccountName, only[*corev1.ServiceAccount](objects)[0].Name)
	})
}

func matches(t *testing.T, s *metav1.LabelSelector, set map[string]string) bool {
	t.Helper()
	selector, err := metav1.LabelSelectorAsSelector(s)
	require.NoError(t, err)
	require.False(t, selector.Empty())
	return selector.Matches(labels.Set(set))
}

func TestSelectorsFindTheirPods(t *testing.T) {
	each(t, slices.Concat(refillers, charts), func(t *testing.T, objects []runtime.Object) {
		found := map[string]int{}
		matched := func(kind string, selector *metav1.LabelSelector, ports ...intstr.IntOrString) {
			workloads := 0
			for name, pod := range pods(objects) {
				if matches(t, selector, pod.Labels) {
					workloads++
					found[kind+" "+name]++
					for _, port := range ports {
						require.True(t, hasPort(pod.Spec.Containers[0], port), "%s: port %s", kind, port.String())
					}
				}
			}
			require.Equal(t, 1, workloads, "each %s selects one workload", kind)
		}
		for _, b := range only[*policyv1.PodDisruptionBudget](objects) {
			matched("budget", b.Spec.Selector)
		}
		for _, p := range only[*networkingv1.NetworkPolicy](objects) {
			var ports []intstr.IntOrString
			for _, in := range p.Spec.Ingress {
				for _, port := range in.Ports {
					ports = append(ports, *port.Port)
				}
			}
			matched("policy", &p.Spec.PodSelector, ports...)
		}
		for _, m := range only[*monitoringv1.PodMonitor](objects) {
			matched("monitor", &m.Spec.Selector, intstr.FromString(*m.Spec.PodMetricsEndpoints[0].Port))
		}
		require.Equal(t, 1, found["budget refiller"])
		require.Equal(t, 1, found["policy refiller"])
		for _, s := range only[*corev1.Service](objects) {
			found := 0
			for _, pod := range pods(objects) {
				if !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
					continue
				}
				found++
				for _, p := range s.Spec.Ports {
					require.True(t, hasPort(pod.Spec.Containers[0], p.TargetPort),
						"service %s has the unknown target port of %s", s.Name, p.Name)
				}
			}
			require.Equal(t, 1, found, "service %s finds the pods of one workload", s.Name)
		}
		for _, m := range only[*monitoringv1.ServiceMonitor](objects) {
			found := false
			for _, s := range only[*corev1.Service](objects) {
				if matches(t, &m.Spec.Selector, s.Labels) {
					found = true
					require.Equal(t, s.Spec.Ports[0].Name, m.Spec.Endpoints[0].Port)
				}
			}
			require.True(t, found)
		}
	})
}

func TestMain(m *testing.M) {
	slog.SetLogLoggerLevel(slog.LevelWarn) // Helm logs each symbolic link
	imagetest.Main(m)
}

func TestTheSidecarIsBesideProgramsWithItsLabel(t *testing.T) {
	t.Parallel()
	objects, err := load(filesys.MakeFsOnDisk(), "overlays/example-app")
	require.NoError(t, err)
	deployments := only[*appsv1.Deployment](objects)
	require.Len(t, deployments, 1)
	spec := deployments[0].Spec.Template.Spec
	require.Len(t, spec.Containers, 1, "the pod has only the program's container")
	require.Len(t, spec.InitContainers, 1)
	c := spec.InitContainers[0]
	require.Equal(t, corev1.ContainerRestartPolicyAlways, *c.RestartPolicy, "the sidecar runs as long as the program")
	require.Equal(t, []string{"/consumer"}, c.Command, "the sidecar's path in the image")

	// Clients outside of the pod reach probes and metrics, but no bucket.
	for _, a := range c.Args {
		address, served := strings.CutPrefix(a, "--http=")
		if !served {
			address, served = strings.CutPrefix(a, "--grpc=")
		}
		if served {
			require.True(t, strings.HasPrefix(address, "127.0.0.1:"), a)
		}
	}
	require.Contains(t, c.Args, fmt.Sprintf("--admin=:%d", c.Ports[0].ContainerPort))
	require.Contains(t, c.Args, "--http=127.0.0.1:8080")
	require.Contains(t, spec.Containers[0].Args[0], "http://127.0.0.1:8080/v1/take")

	understands(t, c)
}

// understands checks that the program accepts the arguments of a sidecar, and fails only at the address of Redis.
func understands(t *testing.T, c corev1.Container) {
	t.Helper()
	args := append(slices.Clone(c.Args), "--redis=nowhere")
	out, err := exec.CommandContext(t.Context(), imagetest.Program(t, "consumer"), args...).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "redis://host:port/db")
}

// The program itself checks the file that it will read, with the environment that the pod will have.
func TestTheProgramAcceptsItsConfiguration(t *testing.T) {
	program := imagetest.Program(t, "refiller")
	dir := t.TempDir() // outlives the parallel tests
	for _, name := range slices.Concat(refillers, charts) {
		t.Run(name, func(t *testing.T) {
			objects, err := loadOf(name)
			require.NoError(t, err)
			maps := slices.DeleteFunc(only[*corev1.ConfigMap](objects), func(c *corev1.ConfigMap) bool {
				return c.Data["config.yaml"] == ""
			})
			require.Len(t, maps, 1)
			require.Equal(t, "refiller", maps[0].Name, "the name is stable, so that a change is reloaded without a rollout")
			path := filepath.Join(dir, "config.yaml")
			require.NoError(t, os.WriteFile(path, []byte(maps[0].Data["config.yaml"]), 0o600))
			check := exec.CommandContext(context.WithoutCancel(t.Context()), program, "check", path)
			c := refillerOf(t, objects).Spec.Template.Spec.Containers[0]
			require.Equal(t, []string{"run", "--config", "/etc/refiller/config.yaml"}, c.Args)
			mode := "mode race"
			if strings.Contains(maps[0].Data["config.yaml"], "mode: etcd") {
				mode = "mode etcd"
			}
			for _, e := range c.Env {
				if e.ValueFrom == nil {
					check.Env = append(check.Env, e.Name+"="+e.Value)
				}
				if e.Name == "REFILLER_ELECTION_MODE" {
					mode = "mode " + e.Value
				}
			}
			out, err := check.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), mode)
			require.NoError(t, os.WriteFile(path, []byte(maps[0].Data["config.yaml"]+"typo: 1\n"), 0o600))
			require.Error(t, exec.CommandContext(t.Context(), program, "check", path).Run())
		})
	}
}
