package main

import (
	"context"
	"errors"
)

// contender is a rate limiter that is measured, or another way to take tokens.
type contender struct {
	name string
	open opener
	// skip reports whether the contender can't run the workload.
	skip func(w workload) bool
}

// opener prepares the workload's keys and returns a session. names has the names of the keys, by number.
type opener func(ctx context.Context, s *server, w workload, names []string) (*session, error)

// session is a contender that is ready to run.
type session struct {
	// take takes a token from the key with the number key, and reports whether it
	// got one. It is safe for concurrent use.
	take func(ctx context.Context, key int) (bool, error)
	// batch is the number of takes that one call of take makes; 0 means 1.
	batch int
	// fast means that a take costs less than reading the clock. Then several takes are timed together.
	fast  bool
	close func() error
}

// contenders returns all contenders. Ratios compare a contender with the one named baseline.
func contenders() []contender {
	return append(append(append([]contender{}, ours()...), libraries()...), floors()...)
}

const baseline = "redis_rate"

func onlyDenied(w workload) bool  { return !w.denied }
func neverDenied(w workload) bool { return w.denied }

// closeAll returns a function that calls the closers in turn and joins their errors.
func closeAll(closers ...func() error) func() error {
	return func() error {
		var errs []error
		for _, c := range closers {
			errs = append(errs, c())
		}
		return errors.Join(errs...)
	}
}
