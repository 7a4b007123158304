package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

const (
	authorities = "PEM file with the certificate authorities to trust instead of the system's"
	certificate = "PEM file with the client certificate"
	privateKey  = "PEM file with the private key of the client certificate"
	prefixForm  = "2 to 256 bytes that begin with a slash and do not end with one"
)

// descriptions describe the flags of configuration variables, by the field that the flag sets.
var descriptions = map[string]string{
	"region": "name of this replica's region: 1 to 128 letters, digits and any of . _ -",
	"listen": "address of the server for the status page, metrics and health checks: host:port, such as 127.0.0.1:9090, " +
		"or :9090 for all addresses",
	"log.level":     "least severe level of messages to log: trace, debug, info, warn, error or off",
	"log.format":    "format of log messages: text or json",
	"election.mode": "rule by which replicas decide which of them refills: race or etcd",

	"redis.url":                    "URL of Redis, such as redis://127.0.0.1:6379",
	"redis.username":               "name of the Redis user; replaces the user in the URL",
	"redis.password_file":          "file with the password of the Redis user",
	"redis.sentinel_username":      "name of the user of the sentinels",
	"redis.sentinel_password_file": "file with the password of the sentinels' user",
	"redis.tls.ca":                 authorities,
	"redis.tls.cert":               certificate,
	"redis.tls.key":                privateKey,

	"election.endpoints":     "etcd addresses, separated by commas, such as host-1:2379,host-2:2379",
	"election.prefix":        "prefix of all keys in etcd: " + prefixForm,
	"election.username":      "name of the etcd user",
	"election.password_file": "file with the password of the etcd user",
	"election.tls.ca":        authorities,
	"election.tls.cert":      certificate,
	"election.tls.key":       privateKey,

	"pool_registry.endpoints":     "addresses of the etcd with the pools, if it differs from --etcd, separated by commas",
	"pool_registry.prefix":        "prefix of the pools' keys in etcd: " + prefixForm,
	"pool_registry.username":      "name of the user of the pools' etcd",
	"pool_registry.password_file": "file with the password of the user of the pools' etcd",
	"pool_registry.tls.ca":        authorities,
	"pool_registry.tls.cert":      certificate,
	"pool_registry.tls.key":       privateKey,
}

// VariableFlags adds the flags of configuration variables to a command. If families are given, it adds only flags in
// these families. For example, --redis and --redis-ca are in the family redis. The values of these flags on the command
// line are appended to overrides.
func VariableFlags(cmd *cobra.Command, variables []fields.Variable, overrides *[]fields.Override, families ...string) {
	for _, v := range variables {
		name := v.Flag()
		if name == "" || !inFamily(name, families) {
			continue
		}
		cmd.Flags().Var(NewValue("string", "", func(text string) error {
			*overrides = append(*overrides, fields.Override{Source: "--" + name, Field: v.Field, Value: text})
			return nil
		}), name, descriptions[v.Field]+" ($"+v.Name+")")
	}
	Group(cmd, "Redis", "redis-")
	Group(cmd, "etcd", "etcd-")
	Group(cmd, "the pool registry", "pool-registry-")
}

// inFamily reports whether a flag is in one of the families. It returns true if there are no families.
func inFamily(name string, families []string) bool {
	for _, family := range families {
		if name == family || strings.HasPrefix(name, family+"-") {
			return true
		}
	}
	return len(families) == 0
}
