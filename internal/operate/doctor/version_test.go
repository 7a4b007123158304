package doctor

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheDoctorRefusesServersThatAreTooOld(t *testing.T) {
	for name, c := range map[string]struct {
		info   map[string]string
		level  Level
		detail string
	}{
		"old Redis":  {map[string]string{"redis_version": "6.2.1"}, Failure, "Redis 6.2.1"},
		"Redis":      {map[string]string{"redis_version": "8.6.0"}, OK, "Redis 8.6.0"},
		"old Valkey": {map[string]string{"redis_version": "7.2.4", "valkey_version": "7.1.0"}, Failure, "Valkey 7.1.0"},
		"Valkey":     {map[string]string{"redis_version": "7.2.4", "valkey_version": "9.1.0"}, OK, "Valkey 9.1.0"},
	} {
		t.Run(name, func(t *testing.T) {
			f := versionFinding(c.info, nil)
			require.Equal(t, c.level, f.Level)
			require.Equal(t, c.detail, f.Detail)
		})
	}
}

func TestTheDoctorSaysWhetherPlainClientsHaveABoundedTake(t *testing.T) {
	for name, c := range map[string]struct {
		found  []any
		err    error
		level  Level
		detail string
	}{
		"server with INCREX":    {[]any{[]any{"increx", int64(-2)}}, nil, OK, "the server has INCREX"},
		"server without INCREX": {[]any{nil}, nil, OK, "the server has no INCREX"},
		"refused":               {nil, errors.New("NOPERM"), Unknown, "NOPERM"},
	} {
		t.Run(name, func(t *testing.T) {
			f := boundedFinding(c.found, c.err)
			require.Equal(t, c.level, f.Level)
			require.Contains(t, f.Detail, c.detail)
		})
	}
}
