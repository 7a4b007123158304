package fetch_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
)

// One client serves the whole process.
func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	defer rdb.Close()
	tokens, err := fetch.New(rdb)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tokens.Close(context.Background())

	result, err := tokens.Take(context.Background(), "checkout", 1)
	switch {
	case err != nil: // Redis is unavailable, or the bucket does not exist: decide what to do then
		fmt.Println(err)
	case !result.OK:
		fmt.Println("denied, retry after", result.RetryAfter)
	default:
		fmt.Println("taken,", result.Remaining, "of", result.Limit, "left")
	}
}

// A batch job takes as many tokens as there are, and does the rest of its work later.
func ExampleClient_TakeUpTo() {
	var tokens *fetch.Client // made at start
	mails := []string{"a", "b", "c"}
	result, err := tokens.TakeUpTo(context.Background(), "mail", int64(len(mails)))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, mail := range mails[:result.Taken] {
		fmt.Println("send", mail)
	}
}

// This work may be late, but by no more than a second.
func ExampleClient_Wait() {
	var tokens *fetch.Client // made at start
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := tokens.Wait(ctx, "partner-api", 1)
	switch {
	case errors.Is(err, fetch.ErrDeadline):
		fmt.Println("too busy") // known at once, without waiting for the second to pass
	case err != nil:
		fmt.Println(err)
	default:
		fmt.Println("call the partner")
	}
}

// Tokens that are not needed after all are returned.
func ExampleClient_Return() {
	var tokens *fetch.Client // made at start
	ctx := context.Background()
	if result, err := tokens.Take(ctx, "llm", 4000); err != nil || !result.OK {
		return
	}
	used := int64(2700)
	if err := tokens.Return(ctx, "llm", 4000-used); err != nil {
		fmt.Println("the tokens may be lost:", err)
	}
}

// This take may wait longer for Redis than other takes.
func ExampleWithTimeout() {
	var tokens *fetch.Client // made at start
	result, err := tokens.Take(context.Background(), "report", 1, fetch.WithTimeout(time.Second))
	fmt.Println(result.OK, err)
}

// The cost of a request to a language model is known only after its response.
func ExampleClient_Reserve() {
	var tokens *fetch.Client // made at start
	ctx := context.Background()
	most, used := int64(4000), int64(0)
	reserved, err := tokens.Reserve(ctx, "llm", most, time.Minute)
	if err != nil || !reserved.OK {
		return
	}
	used = 2700 // the request is made
	if _, err := reserved.Settle(ctx, used); err != nil {
		fmt.Println("not settled, all of it goes back in a minute:", err)
	}
}

// Batch work leaves a fifth of the bucket to interactive work. So interactive work comes first whenever tokens are
// scarce.
func ExampleWithLeavePercent() {
	var tokens *fetch.Client // made at start
	interactive := func(ctx context.Context) (fetch.Result, error) {
		return tokens.Take(ctx, "checkout", 1)
	}
	batch := func(ctx context.Context) error { // it waits until its tokens are there in addition to the fifth
		_, err := tokens.Wait(ctx, "checkout", 50, fetch.WithLeavePercent(20))
		return err
	}
	_, _ = interactive, batch
}
