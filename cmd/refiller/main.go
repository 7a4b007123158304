// Refiller keeps token buckets in Redis full. Run "refiller --help" for its commands.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // calendars name time zones, and a container may have no database of them

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

func main() {
	redisconn.SetLogger(nil) // errors have the important information, and run logs it
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], cli.ProcessEnv())
	stop()
	os.Exit(code)
}
