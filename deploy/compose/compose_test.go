package compose

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/yaml"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

func load(t *testing.T) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{"compose.yaml"})
	require.NoError(t, err)
	project, err := options.LoadProject(t.Context()) // refuses fields that the specification doesn't have
	require.NoError(t, err)
	return project
}

func TestTheFileIsOfTheSpecificationAndItsMountsAreThere(t *testing.T) {
	project := load(t)
	names := []string{"redis", "etcd", "refiller-1", "refiller-2", "sidecar", "envoy", "prometheus", "grafana"}
	require.ElementsMatch(t, names, project.ServiceNames())
	published := map[string]bool{}
	for name, s := range project.Services {
		require.Regexp(t, `:(v?\d|demo$)`, s.Image, "%s: %s is not pinned", name, s.Image)
		for _, v := range s.Volumes {
			if v.Type == types.VolumeTypeBind {
				_, err := os.Stat(v.Source)
				require.NoError(t, err, name)
			}
		}
		for _, p := range s.Ports {
			require.Equal(t, "127.0.0.1", p.HostIP, "%s is open to other hosts", name)
			require.False(t, published[p.Published], "port %s is published twice", p.Published)
			published[p.Published] = true
		}
		for other, on := range s.DependsOn {
			if on.Condition == types.ServiceConditionHealthy {
				require.NotNil(t, project.Services[other].HealthCheck, "%s waits for %s, which has no health check", name, other)
			}
		}
	}
}

// If several services build one tag at the same time, BuildKit fails with "image already exists".
func TestOneServiceBuildsTheImageOfAll(t *testing.T) {
	var builders, users []string
	for name, s := range load(t).Services {
		if s.Image == "refiller:demo" {
			users = append(users, name)
		}
		if s.Build != nil {
			builders = append(builders, name)
			require.Equal(t, "refiller:demo", s.Image)
		}
	}
	require.ElementsMatch(t, []string{"refiller-1", "refiller-2", "sidecar"}, users)
	require.Equal(t, []string{"refiller-1"}, builders)
}

func TestMain(m *testing.M) { imagetest.Main(m) }

// output runs the command of a service. Mounted files are replaced by the files in the repository.
func output(t *testing.T, program string, s types.ServiceConfig, more ...string) string {
	t.Helper()
	args := slices.Clone(s.Command)
	for i := range args {
		for _, v := range s.Volumes {
			args[i] = strings.ReplaceAll(args[i], v.Target, v.Source)
		}
	}
	out, _ := exec.CommandContext(t.Context(), imagetest.Program(t, program), append(args, more...)...).CombinedOutput()
	return string(out)
}

func TestTheProgramsUnderstandTheirArgumentsAndFiles(t *testing.T) {
	project := load(t)
	for _, name := range []string{"refiller-1", "refiller-2"} {
		s := project.Services[name]
		require.Equal(t, types.ShellCommand{"run", "--config", "/etc/refiller/config.yaml"}, s.Command)
		s.Command = types.ShellCommand{"check", "/etc/refiller/config.yaml"}
		require.Contains(t, output(t, "refiller", s), "mode etcd")
	}
	sidecar := project.Services["sidecar"]
	require.Equal(t, types.ShellCommand{"/consumer"}, sidecar.Entrypoint)
	// The program accepts its arguments and fails only at the address of Redis. With a valid address, it fails without the
	// file for Envoy.
	require.Contains(t, output(t, "consumer", sidecar, "--redis=nowhere"), "redis://host:port/db")
	out := output(t, "consumer", sidecar, "--redis=redis://127.0.0.1:1/0", "--envoy=missing.yaml")
	require.Contains(t, out, "missing.yaml")
}

// envoyConfig reads a configuration of Envoy, and returns the configuration of its first filter.
func envoyConfig(t *testing.T, file string) *hcmv3.HttpConnectionManager {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	asJSON, err := yaml.YAMLToJSONStrict(text)
	require.NoError(t, err)
	var bootstrap bootstrapv3.Bootstrap
	require.NoError(t, protojson.Unmarshal(asJSON, &bootstrap))
	require.NoError(t, bootstrap.ValidateAll())
	var manager hcmv3.HttpConnectionManager
	filter := bootstrap.StaticResources.Listeners[0].FilterChains[0].Filters[0]
	require.NoError(t, filter.GetTypedConfig().UnmarshalTo(&manager))
	require.NoError(t, manager.ValidateAll())
	return &manager
}

func TestEnvoysConfigurationIsOfItsAPI(t *testing.T) {
	envoyConfig(t, "../../examples/envoy/envoy.yaml")
	manager := envoyConfig(t, "envoy.yaml")

	// The sidecar's file must have Envoy's descriptor, and its bucket must exist.
	action := manager.GetRouteConfig().VirtualHosts[0].RateLimits[0].Actions[0].GetGenericKey().DescriptorValue
	var edge struct {
		Descriptors []struct {
			Value     string
			RateLimit struct{ Bucket string } `json:"rate_limit"`
		}
	}
	read(t, "sidecar/edge.yaml", &edge)
	require.Equal(t, action, edge.Descriptors[0].Value)
	var config struct{ Buckets []struct{ Key string } }
	read(t, "refiller/config.yaml", &config)
	require.Contains(t, config.Buckets, struct{ Key string }{edge.Descriptors[0].RateLimit.Bucket})
}

func read(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, into))
}

// Every address in a file must be a service of the demo, with a port on which the service listens.
func TestPrometheusAndGrafanaAskServicesOfTheDemo(t *testing.T) {
	project := load(t)
	var prometheus struct {
		ScrapeConfigs []struct {
			StaticConfigs []struct{ Targets []string } `json:"static_configs"`
		} `json:"scrape_configs"`
		RuleFiles []string `json:"rule_files"`
	}
	read(t, "prometheus.yaml", &prometheus)
	var targets []string
	for _, c := range prometheus.ScrapeConfigs {
		targets = append(targets, c.StaticConfigs[0].Targets...)
	}
	require.Equal(t, []string{"refiller-1:9090", "refiller-2:9090", "sidecar:9091"}, targets)
	for _, target := range targets {
		name, _, _ := strings.Cut(target, ":")
		require.Contains(t, project.ServiceNames(), name)
	}
	var mounted []string
	for _, name := range []string{"prometheus", "grafana"} {
		for _, v := range project.Services[name].Volumes {
			mounted = append(mounted, v.Target)
		}
	}
	require.Subset(t, mounted, prometheus.RuleFiles)
	require.Contains(t, mounted, *project.Services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
	var source struct{ Datasources []struct{ URL string } }
	read(t, "grafana/datasource.yaml", &source)
	require.Equal(t, "http://prometheus:9090", source.Datasources[0].URL)
}
