package main

import (
	"context"
	"errors"
)

// contender is one way to take a token.
type contender struct {
	name string
	open opener
	// skip reports whether the contender has nothing to say about the workload.
	skip func(w workload) bool
}

// opener prepares the workload's keys, which are in the order of names.
type opener func(ctx context.Context, s *server, w workload, names []string) (*session, error)

// session is a contender that is ready to run.
type session struct {
	// take takes a token of the key with that number and reports whether it got
	// one. It is safe for concurrent use.
	take func(ctx context.Context, key int) (bool, error)
	// batch is how many tokens a take counts for; 0 is 1.
	batch int
	// fast says that a take costs less than reading the clock: only a sample of the takes is timed.
	fast  bool
	close func() error
}

// contenders are all of them; ratios are against the one with the name baseline.
func contenders() []contender {
	return append(append(append([]contender{}, ours()...), libraries()...), floors()...)
}

const baseline = "redis_rate"

func onlyDenied(w workload) bool  { return !w.denied }
func neverDenied(w workload) bool { return w.denied }

// closeAll closes in turn and joins the errors.
func closeAll(closers ...func() error) func() error {
	return func() error {
		var errs []error
		for _, c := range closers {
			errs = append(errs, c())
		}
		return errors.Join(errs...)
	}
}
