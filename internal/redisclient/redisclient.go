// Package redisclient checks the Redis clients that callers pass. It makes none: see package redisconn.
package redisclient

import (
	"reflect"

	"github.com/redis/go-redis/v9"
)

// IsNil reports whether rdb is a nil interface or contains a nil pointer.
func IsNil(rdb redis.UniversalClient) bool {
	v := reflect.ValueOf(rdb)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}
