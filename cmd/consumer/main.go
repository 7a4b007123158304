// Consumer takes tokens from buckets in Redis, from the command line. Run "consumer --help" for its commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // limits name time zones, and a container may have no database of them

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

func main() {
	redisconn.SetLogger(nil) // errors of commands have the important information
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], cli.ProcessEnv()))
}
