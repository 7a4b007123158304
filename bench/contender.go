package main

import (
	"context"
	"errors"
)

// contender is a limiter, or another way to take tokens, that is measured.
type contender struct {
	name string
	open opener
	// skip reports whether the contender can't run the workload.
	skip func(w workload) bool
}

// opener prepares the workload's keys, which are in the order of names.
type opener func(ctx context.Context, s *server, w workload, names []string) (*session, error)

// session is a contender that is ready to run.
type session struct {
	// take takes a token of the key with that number and reports whether it got
	// one. It is safe for concurrent use.
	take func(ctx context.Context, key int) (bool, error)
	// batch is the number of takes that one call counts as; 0 means 1.
	batch int
	// fast reports that a take costs less than reading the clock. Then only a sample of the takes is timed.
	fast  bool
	close func() error
}

// contenders returns all contenders. Ratios compare with the one that has the name baseline.
func contenders() []contender {
	return append(append(append([]contender{}, ours()...), libraries()...), floors()...)
}

const baseline = "redis_rate"

func onlyDenied(w workload) bool  { return !w.denied }
func neverDenied(w workload) bool { return w.denied }

// closeAll calls the functions in turn and joins their errors.
func closeAll(closers ...func() error) func() error {
	return func() error {
		var errs []error
		for _, c := range closers {
			errs = append(errs, c())
		}
		return errors.Join(errs...)
	}
}
