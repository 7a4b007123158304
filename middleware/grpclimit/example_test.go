package grpclimit_test

import (
	"fmt"

	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"

	"github.com/tokenrefill/refiller/limit/lazy"
	grpclimit "github.com/tokenrefill/refiller/middleware/grpclimit"
	"github.com/tokenrefill/refiller/policy"
)

// Each client may call each method 10 times a second, and 20 times at once.
func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	buckets, err := lazy.New(rdb, lazy.Config{Capacity: 20, Rate: policy.PerSecond(10)})
	if err != nil {
		fmt.Println(err)
		return
	}
	limits, err := grpclimit.New(grpclimit.Config{
		Limiter: buckets,
		Key:     grpclimit.Join(grpclimit.ByPeer(), grpclimit.ByMethod()),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(limits.Unary), grpc.StreamInterceptor(limits.Stream))
	defer server.Stop()
}
