package refill

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

func TestOneEventOfManyBucketsIsOneLogLine(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		const many = 5000
		buckets := make([]Bucket, many)
		for i := range buckets {
			buckets[i] = Bucket{Key: fmt.Sprintf("b%d", i), Policy: policy.Policy{Capacity: 100,
				Rate: policy.PerSecond(10), Interval: time.Second}}
		}
		a := r.start("a", false, 0, buckets...)
		time.Sleep(10 * time.Second)
		r.server.set(func() {
			require.Len(t, r.server.buckets, many)
			r.server.skew = -time.Hour
		})
		time.Sleep(10 * time.Second)
		a.stop()
		for _, news := range []string{"bucket created: bucket=b",
			"server clock stepped back: bucket begins a new era: bucket=b"} {
			lines, reported := 0, 0
			for line := range strings.Lines(log.String()) {
				if !strings.Contains(line, news) {
					continue
				}
				others := 0
				if _, rest, found := strings.Cut(line, "others="); found {
					_, err := fmt.Sscan(rest, &others)
					require.NoError(t, err, line)
				}
				lines++
				reported += 1 + others
			}
			require.Equal(t, many, reported, news)
			require.LessOrEqual(t, lines, many/10, news)
		}
	})
}
