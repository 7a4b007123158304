package election

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func validConfig() Config {
	cfg := DefaultConfig()
	cfg.Client, cfg.Identity = &clientv3.Client{}, "a"
	return cfg
}

func TestDefaultsAreValid(t *testing.T) {
	t.Parallel()
	require.NoError(t, validConfig().Validate())
	_, err := New(validConfig())
	require.NoError(t, err)
}

func TestValidateNamesFieldRangeAndValue(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(*Config)
		want   []string
	}{
		"no client":     {func(c *Config) { c.Client = nil }, []string{"Client"}},
		"no prefix":     {func(c *Config) { c.Prefix = "" }, []string{"Prefix", "1 to 256", `""`}},
		"slash":         {func(c *Config) { c.Prefix = "/refiller/" }, []string{"Prefix", "slash", `"/refiller/"`}},
		"long prefix":   {func(c *Config) { c.Prefix = strings.Repeat("p", 257) }, []string{"Prefix", "256"}},
		"no identity":   {func(c *Config) { c.Identity = "" }, []string{"Identity", "1 to 256"}},
		"long identity": {func(c *Config) { c.Identity = strings.Repeat("i", 257) }, []string{"Identity", "257"}},
		"short TTL":     {func(c *Config) { c.TTL = 0 }, []string{"TTL", "1s to 10m0s", "0s"}},
		"long TTL":      {func(c *Config) { c.TTL = 11 * time.Minute }, []string{"TTL", "11m0s"}},
		"broken TTL":    {func(c *Config) { c.TTL = 1500 * time.Millisecond }, []string{"TTL", "whole seconds", "1.5s"}},
		"no margin":     {func(c *Config) { c.SafetyMargin = 0 }, []string{"SafetyMargin", "50ms to 2.5s", "TTL 5s", "0s"}},
		"wide margin":   {func(c *Config) { c.SafetyMargin = 3 * time.Second }, []string{"SafetyMargin", "2.5s", "3s"}},
		"no retry":      {func(c *Config) { c.RetryInterval = 0 }, []string{"RetryInterval", "10ms to 1m0s", "0s"}},
		"slow retry":    {func(c *Config) { c.RetryInterval = time.Hour }, []string{"RetryInterval", "1h0m0s"}},
		"no resigning":  {func(c *Config) { c.ResignTimeout = -1 }, []string{"ResignTimeout", "10ms to 1m0s", "-1ns"}},
		"several faults": {func(c *Config) { *c = Config{} },
			[]string{"Client", "Prefix", "Identity", "TTL", "RetryInterval"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := validConfig()
			test.change(&cfg)
			_, err := New(cfg)
			require.Error(t, err)
			for _, want := range test.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestRoleStrings(t *testing.T) {
	t.Parallel()
	for role, name := range map[Role]string{
		RoleIdle: "idle", RoleCandidate: "candidate", RoleStandby: "standby", RoleLeader: "leader", Role(9): "role 9",
	} {
		require.Equal(t, name, role.String())
	}
}
