package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
)

// distance is the smoothed round trip to a server. It is 0 before the server's first answer.
type distance time.Duration

// distance returns the server's distance.
func (s *node) distance() distance {
	if s.lost != nil {
		return 0
	}
	return distance(s.queue.RoundTrip())
}

// needs returns how long a healthy server may be silent about a request, as far as its distance shows.
func (d distance) needs() time.Duration { return min(engine.Trips*time.Duration(d), maxDefaultTimeout) }

// timeout returns the default timeout: DefaultTimeout, or four round trips if they take longer. A rescue needs four.
func (d distance) timeout() time.Duration {
	if d == 0 {
		return maxDefaultTimeout
	}
	return max(DefaultTimeout, d.needs())
}

// Timeout returns the present timeout of calls for a bucket that have neither WithTimeout nor a context's deadline. It
// is the timeout that New got by WithTimeout (0 for none). Without that option it is the default at the distance of the
// bucket's server.
func (c *Client) Timeout(key string) time.Duration {
	if c.config.timed {
		return c.config.timeout
	}
	return c.nodes.of(key).distance().timeout()
}

// late returns the error of a request about which the server was silent for a while. If a healthy server may be silent
// for as long, a timeout is no failure of the server: it is a distanceError.
func (d distance) late(silent time.Duration, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && silent < d.needs() {
		return &distanceError{trip: time.Duration(d), silent: silent}
	}
	return err
}

// distanceError is the cause of an ErrUnavailable: the call had too little time for the server's distance.
type distanceError struct{ trip, silent time.Duration }

func (e *distanceError) Error() string {
	return fmt.Sprintf("no answer within %s, which is too short for a round trip of %s: %v",
		e.silent.Round(time.Millisecond/10), e.trip.Round(time.Millisecond/10), e.Unwrap())
}

// Unwrap makes the error match context.DeadlineExceeded.
func (*distanceError) Unwrap() error { return context.DeadlineExceeded }
