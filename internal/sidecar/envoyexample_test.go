package sidecar

import (
	"os"
	"testing"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

const exampleDir = "../../examples/envoy/"

// edgeConfig has the rate limits in the example's configuration of Envoy.
type edgeConfig struct {
	domain string
	routes map[string][]edgeLimit // by prefix
}

type edgeLimit struct {
	Actions []struct {
		RemoteAddress *struct{} `yaml:"remote_address"`
		GenericKey    *struct {
			Value string `yaml:"descriptor_value"`
		} `yaml:"generic_key"`
		RequestHeaders *struct {
			Name string `yaml:"header_name"`
			Key  string `yaml:"descriptor_key"`
		} `yaml:"request_headers"`
	} `yaml:"actions"`
	Hits *struct {
		Number *uint64 `yaml:"number"`
		Format string  `yaml:"format"`
	} `yaml:"hits_addend"`
	AtEnd bool `yaml:"apply_on_stream_done"`
}

func readEdge(t *testing.T) edgeConfig {
	t.Helper()
	data, err := os.ReadFile(exampleDir + "envoy.yaml")
	require.NoError(t, err)
	var file struct {
		Static struct {
			Listeners []struct {
				Chains []struct {
					Filters []struct {
						Config struct {
							Routes struct {
								Hosts []struct {
									Routes []struct {
										Match struct{ Prefix string }
										Route struct {
											Limits []edgeLimit `yaml:"rate_limits"`
										}
									}
								} `yaml:"virtual_hosts"`
							} `yaml:"route_config"`
							Filters []struct {
								Config struct{ Domain string } `yaml:"typed_config"`
							} `yaml:"http_filters"`
						} `yaml:"typed_config"`
					}
				} `yaml:"filter_chains"`
			}
		} `yaml:"static_resources"`
	}
	require.NoError(t, yaml.Unmarshal(data, &file))
	config := file.Static.Listeners[0].Chains[0].Filters[0].Config
	edge := edgeConfig{config.Filters[0].Config.Domain, map[string][]edgeLimit{}}
	for _, r := range config.Routes.Hosts[0].Routes {
		edge.routes[r.Match.Prefix] = r.Route.Limits
	}
	return edge
}

// ask returns the request that Envoy sends when a request comes. If end is set, it is the request that Envoy sends when
// the stream has ended and used so many tokens.
func (e edgeConfig) ask(route, address string, header map[string]string, end bool, used uint64) *rls.RateLimitRequest {
	req := &rls.RateLimitRequest{Domain: e.domain}
	for _, limit := range e.routes[route] {
		if limit.AtEnd != end {
			continue
		}
		d := &descriptorpb.RateLimitDescriptor{}
		for _, a := range limit.Actions {
			switch {
			case a.RemoteAddress != nil:
				d.Entries = append(d.Entries, &descriptorpb.RateLimitDescriptor_Entry{Key: "remote_address", Value: address})
			case a.GenericKey != nil:
				d.Entries = append(d.Entries, of("generic_key", a.GenericKey.Value).Entries...)
			case header[a.RequestHeaders.Name] != "":
				d.Entries = append(d.Entries, of(a.RequestHeaders.Key, header[a.RequestHeaders.Name]).Entries...)
			}
		}
		if len(d.Entries) != len(limit.Actions) {
			continue // Envoy leaves out a descriptor that lacks an entry
		}
		switch {
		case limit.Hits == nil:
		case limit.Hits.Number != nil:
			d = hits(*limit.Hits.Number, d)
		default:
			d = hits(used, d)
		}
		req.Descriptors = append(req.Descriptors, d)
	}
	return req
}

// This test uses the example's files as Envoy does, but without Envoy.
func TestTheExampleForEnvoyLimits(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		data, err := os.ReadFile(exampleDir + "limits.yaml")
		require.NoError(t, err)
		o.Envoy, err = envoy.Parse(map[string][]byte{"limits.yaml": data},
			envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions()))
		require.NoError(t, err)
	})
	for key, capacity := range map[string]int64{"checkout": 6, "partner:acme": 2, "llm:red": 100} {
		b.bucket(key, capacity)
	}
	edge, client := readEdge(t), rls.NewRateLimitServiceClient(b.dial())
	comes := func(route, address, header, value string) rls.RateLimitResponse_Code {
		headers := map[string]string{header: value}
		return should(t, client, edge.ask(route, address, headers, false, 0)).GetOverallCode()
	}
	for range 5 {
		require.Equal(t, codeOK, comes("/checkout", "192.0.2.1", "", ""))
	}
	require.Equal(t, over, comes("/checkout", "192.0.2.1", "", ""), "an address may send five requests a minute")
	require.EqualValues(t, 1, b.tokens("checkout"), "the refused request has given its token back")
	require.Equal(t, codeOK, comes("/checkout", "192.0.2.2", "", ""))
	require.Equal(t, over, comes("/checkout", "192.0.2.3", "", ""), "the bucket is empty")

	require.Equal(t, codeOK, comes("/partners", "", "x-partner", "acme"))
	require.Equal(t, codeOK, comes("/partners", "", "x-partner", "acme"))
	require.Equal(t, over, comes("/partners", "", "x-partner", "acme"))
	require.Empty(t, edge.ask("/partners", "", nil, false, 0).GetDescriptors(),
		"a request without the header has no descriptors")

	team := map[string]string{"x-team": "red"}
	for _, used := range []uint64{80, 50} { // the second stream uses more than is left
		require.Equal(t, codeOK, comes("/v1/chat", "", "x-team", "red"))
		should(t, client, edge.ask("/v1/chat", "", team, true, used))
	}
	require.Zero(t, b.tokens("llm:red"))
	require.Equal(t, over, comes("/v1/chat", "", "x-team", "red"))
}
