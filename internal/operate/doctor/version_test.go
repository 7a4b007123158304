package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheVersionSaysWhetherPlainClientsHaveABoundedCommand(t *testing.T) {
	for version, c := range map[string]struct {
		info   map[string]string
		level  Level
		detail string
	}{
		"old Redis": {map[string]string{"redis_version": "6.2.1"}, Failure, "Redis 6.2.1, without INCREX"},
		"Redis":     {map[string]string{"redis_version": "8.6.0"}, OK, "Redis 8.6.0, without INCREX"},
		"new Redis": {map[string]string{"redis_version": "8.8.0"}, OK, "Redis 8.8.0, with INCREX"},
		"Valkey": {map[string]string{"redis_version": "7.2.4", "valkey_version": "9.1.0"}, OK,
			"Valkey 9.1.0, without INCREX"},
		"new Valkey": {map[string]string{"redis_version": "7.2.4", "valkey_version": "9.2.0"}, OK,
			"Valkey 9.2.0, with INCREX"},
	} {
		t.Run(version, func(t *testing.T) {
			f := versionFinding(c.info, nil)
			require.Equal(t, c.level, f.Level)
			require.Contains(t, f.Detail, c.detail)
		})
	}
}
