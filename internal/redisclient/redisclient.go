// Package redisclient checks the Redis clients that callers pass. It makes none: see package redisconn.
package redisclient

import (
	"reflect"

	"github.com/redis/go-redis/v9"
)

// IsNil reports whether there is no client: a nil interface, or a nil pointer in it.
func IsNil(rdb redis.UniversalClient) bool {
	v := reflect.ValueOf(rdb)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}
