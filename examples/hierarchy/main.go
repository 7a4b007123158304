// Command hierarchy charges each request to three buckets, or to none of them: the bucket of its user, of the user's
// team, and of a pool that all regions share. Batch work leaves a part of each bucket for interactive work. "refiller
// run" with hierarchy.yaml refills the pool's bucket in the region's Redis, and publishes the templates of teams and
// users. Then this command can be tried with:
//
//	curl -i -H 'X-Team: red' -H 'X-User: ann' http://127.0.0.1:8080/
//	curl -i -H 'X-Team: red' -H 'X-User: ann' -H 'X-Batch: 1' http://127.0.0.1:8080/
package main

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"os"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
)

// leaveToInteractive is the percentage of each bucket that batch work leaves for interactive work.
const leaveToInteractive = 20

func main() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	client, err := fetch.New(rdb)
	if err == nil {
		err = http.ListenAndServe("127.0.0.1:8080", handler(client))
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// charge takes a token from each of three buckets, or none: the buckets of the user, the team and the pool. In the
// result, Denied is the key of the bucket that denied.
func charge(ctx context.Context, client *fetch.Client, team, user string, batch bool) (fetch.AllResult, error) {
	var opts []fetch.CallOption
	if batch {
		opts = append(opts, fetch.WithLeavePercent(leaveToInteractive))
	}
	return client.TakeAll(ctx, []fetch.Request{
		{Key: "user:" + team + "/" + user, N: 1}, // Denied is the first bucket that denies, so the narrowest is first
		{Key: "team:" + team, N: 1},
		{Key: "api", N: 1},
	}, opts...)
}

func handler(client *fetch.Client) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		team, user := r.Header.Get("X-Team"), r.Header.Get("X-User") // set by the proxy that authenticates the caller
		if team == "" || user == "" {
			http.Error(w, "want X-Team and X-User", http.StatusBadRequest)
			return
		}
		all, err := charge(r.Context(), client, team, user, r.Header.Get("X-Batch") != "")
		switch {
		case err != nil:
			http.Error(w, "no decision", limit.OutcomeOf(err).HTTP)
		case !all.OK:
			w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(all.RetryAfter.Seconds()))))
			http.Error(w, all.Denied+" has too few tokens", http.StatusTooManyRequests)
		default:
			fmt.Fprintln(w, "done")
		}
	})
}
