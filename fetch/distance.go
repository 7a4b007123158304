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

// needs returns for how long a healthy server at this distance may be silent about a request.
func (d distance) needs() time.Duration { return min(engine.Trips*time.Duration(d), maxDefaultTimeout) }

// timeout returns the default timeout: DefaultTimeout, or four round trips if they take longer. A take with a rescue
// needs four.
func (d distance) timeout() time.Duration {
	if d == 0 {
		return maxDefaultTimeout
	}
	return max(DefaultTimeout, d.needs())
}

// Timeout returns the present timeout of a call for a bucket, if the call has neither the option WithTimeout nor a
// deadline of its context. If New had the option WithTimeout, its timeout applies (0 for none). Otherwise the timeout
// depends on the distance to the bucket's server.
func (c *Client) Timeout(key string) time.Duration {
	if c.config.timed {
		return c.config.timeout
	}
	return c.nodes.of(key).distance().timeout()
}

// late returns the error of a request that failed with err after the server was silent about it for some time. If err
// is a timeout, but a healthy server may be silent for as long, late returns a distanceError: this is no failure of the
// server.
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
