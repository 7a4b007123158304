package election_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
)

// Lead whenever this process is elected, until it is interrupted.
func ExampleElector_Run() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:2379"}})
	if err != nil {
		log.Print(err)
		return
	}
	defer func() { _ = client.Close() }() // nothing is left to lose

	cfg := election.DefaultConfig()
	cfg.Client, cfg.Identity = client, "pod-1"
	elector, err := election.New(cfg)
	if err != nil {
		log.Print(err)
		return
	}
	err = elector.Run(ctx, func(ctx context.Context, term election.Term) error {
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			if term.Remaining(time.Now()) > 0 {
				fmt.Println("leading under epoch", term.Epoch)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-ticker.C:
			}
		}
	})
	if err != nil {
		log.Print(err)
	}
}
