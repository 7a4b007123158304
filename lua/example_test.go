package lua_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A refiller creates a bucket and a consumer takes from it.
func ExampleTake() {
	server, err := miniredis.Run() // in place of a Redis server
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close()
	server.SetTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer func() { _ = rdb.Close() }()
	ctx := context.Background()

	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(500)}.Terms(policy.Fence{Epoch: 1})
	out, err := lua.Refill(ctx, rdb, "checkout", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	fmt.Println(out.Status, out.Tokens, err)

	taken, err := lua.Take(ctx, rdb, "checkout", 70, false)
	fmt.Println(taken.OK, taken.Remaining, err)
	taken, err = lua.Take(ctx, rdb, "checkout", 70, false)
	fmt.Println(taken.OK, taken.Remaining, taken.Wait, err)
	_, err = lua.Take(ctx, rdb, "chekcout", 1, false)
	fmt.Println(errors.Is(err, lua.ErrUnknownBucket))
	// Output:
	// initialised 100 <nil>
	// true 30 <nil>
	// false 30 100ms <nil>
	// true
}

func ExampleCheckKey() {
	fmt.Println(lua.CheckKey("user:42"), lua.IndexKey("user:42"), lua.ControlKey("user:42"))
	fmt.Println(lua.CheckKey("a}b"))
	// Output:
	// <nil> {user:42} {user:42}:ctl
	// refiller: invalid key "a}b": a closing brace is not allowed
}
