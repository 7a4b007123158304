package fetch

import (
	"context"
	"reflect"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// mapEntries counts the entries of all maps that can be reached from v.
func mapEntries(v reflect.Value, seen map[uintptr]bool) int {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() || seen[v.Pointer()] {
			return 0
		}
		seen[v.Pointer()] = true
		return mapEntries(v.Elem(), seen)
	case reflect.Interface:
		if v.IsNil() {
			return 0
		}
		return mapEntries(v.Elem(), seen)
	case reflect.Struct:
		n := 0
		for i := range v.NumField() {
			n += mapEntries(v.Field(i), seen)
		}
		return n
	case reflect.Array, reflect.Slice:
		n := 0
		for i := range v.Len() {
			n += mapEntries(v.Index(i), seen)
		}
		return n
	case reflect.Map:
		n := v.Len()
		for it := v.MapRange(); it.Next(); {
			n += mapEntries(it.Value(), seen)
		}
		return n
	}
	return 0
}

func TestMemoryDoesNotGrowWithKeysTaken(t *testing.T) {
	const size = 5000
	c := newClient(t, generous(), slow(), WithCacheSize(size))
	for i := range 3 * size {
		_, err := c.Take(t.Context(), "user:"+strconv.Itoa(i), 1)
		require.NoError(t, err)
		if i%64 == 0 {
			require.NoError(t, errOf(c.Wait(t.Context(), "queue:"+strconv.Itoa(i), 1)))
		}
	}
	require.NoError(t, c.Close(t.Context())) // the maps are no longer written
	require.LessOrEqual(t, c.buckets.held(), 2*size+2*size/8)
	const scripts = 10 // the scripts that the fake server knows
	require.LessOrEqual(t, mapEntries(reflect.ValueOf(c), map[uintptr]bool{}), c.buckets.held()+scripts,
		"the client's other maps have few entries")
}

// BenchmarkDistinctKeys takes from a new key each time, on a fake server that needs almost no time. It reports how much
// memory the process got from the system, and how much is on its heap. With -benchtime 10000000x, that is the memory
// for ten million keys.
func BenchmarkDistinctKeys(b *testing.B) {
	c := newClient(b, generous(), slow())
	ctx, i := context.Background(), 0
	for b.Loop() {
		i++
		if _, err := c.Take(ctx, "user:"+strconv.Itoa(i), 1); err != nil {
			b.Fatal(err)
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.Sys)/1e6, "MB-of-system")
	runtime.GC()
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.HeapAlloc)/1e6, "MB-live")
	runtime.KeepAlive(c)
}
