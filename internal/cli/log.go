package cli

import (
	"os/signal"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli/logqueue"
)

// QueuedLogger returns the logger of a command that serves until it is stopped. From then on the command neither waits
// for the reader of stderr nor ends with it. Execute writes an error of the command to the same queue.
func QueuedLogger(cmd *cobra.Command, options hclog.LoggerOptions) hclog.Logger {
	signal.Ignore(syscall.SIGPIPE)
	log, queue := logqueue.New(options)
	cmd.Root().SetErr(queue)
	return log
}

// flushErr waits for a moment until what the program wrote to stderr is written, if QueuedLogger was called.
func flushErr(root *cobra.Command) {
	queue, ok := root.ErrOrStderr().(*logqueue.Queue)
	if ok {
		queue.Flush()
	}
}
