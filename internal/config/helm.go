package config

import (
	"fmt"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// helmValues are the values of the Helm chart, other than config, that affect the configuration of replicas.
type helmValues struct {
	ExistingConfigMap string `yaml:"existingConfigMap"`
	VersionFrom       string `yaml:"versionFrom"`
	ExtraEnv          []struct {
		Name  string  `yaml:"name"`
		Value *string `yaml:"value"`
	} `yaml:"extraEnv"`
}

// chartDefaults are the values that the chart itself has for required fields.
var chartDefaults = []Override{{Source: "default of the chart", Field: "redis.url", Value: "redis://redis:6379/0"}}

// FromHelmValues returns the source of the configuration that replicas get from a file of values of the Helm chart.
// path is the name of that file. The configuration is the value config. It replaces the chart's defaults, and the
// variables of extraEnv replace its fields. A variable whose value comes from a Secret or a ConfigMap is ignored,
// because its value is unknown. fromRelease reports that the configuration's version is unknown, because the release
// determines it.
func FromHelmValues(path string, data []byte) (s Source, fromRelease bool, err error) {
	var values helmValues
	if err := yaml.Unmarshal(data, &values); err != nil {
		return Source{}, false, fmt.Errorf("%s: %w", path, err)
	}
	if values.ExistingConfigMap != "" {
		return Source{}, false, fmt.Errorf(
			"%s: existingConfigMap: the configuration is in the ConfigMap %s: check its config.yaml",
			path, values.ExistingConfigMap)
	}
	switch values.VersionFrom {
	case "", "config", "release":
	default:
		return Source{}, false, fmt.Errorf("%s: versionFrom: %q; want config or release", path, values.VersionFrom)
	}
	env := fields.Environment{}
	for i, v := range values.ExtraEnv {
		if v.Name == "" {
			return Source{}, false, fmt.Errorf("%s: extraEnv[%d]: name is missing", path, i)
		}
		if v.Value != nil {
			env[v.Name] = *v.Value
		}
	}
	s = Source{Path: path, Data: data, Under: "config", Defaults: chartDefaults, Env: env}
	return s, values.VersionFrom == "release", nil
}
