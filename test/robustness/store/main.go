// Command store runs the embedded store as a process. It accepts the arguments of a redis-server, but uses only --port.
package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"

	"github.com/tokenrefill/refiller/internal/dev/devserver"
)

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {} // until it is killed
}

func run(args []string) error {
	at := slices.Index(args, "--port") + 1
	if at == 0 || at == len(args) {
		return fmt.Errorf("store: --port is missing")
	}
	port, err := strconv.Atoi(args[at])
	if err != nil {
		return fmt.Errorf("store: --port %s: %w", args[at], err)
	}
	_, err = devserver.StartRedis(port)
	return err
}
