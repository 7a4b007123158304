package dev

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A replica that ignores SIGTERM is killed after a while, so that the playground ends.
func TestAReplicaThatDoesNotStopIsKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := filepath.Join(dir, "deaf")
	const script = "#!/bin/sh\ntrap '' TERM\necho deaf [WARN] now\nexec sleep 600\n"
	require.NoError(t, os.WriteFile(program, []byte(script), 0o700))
	deaf := make(chan struct{})
	out := writerFunc(func() { close(deaf) })
	p := &playground{opts: Options{Program: program}, dir: dir, screen: &screen{out: out}}
	r := &replica{playground: p, name: "one", config: func(string) string { return "" }}
	ctx, stop := context.WithCancel(t.Context())
	life, err := r.start(ctx)
	require.NoError(t, err)
	<-deaf
	began := time.Now()
	stop()
	<-life.exited
	require.GreaterOrEqual(t, time.Since(began), stopTimeout)
	require.Equal(t, "signal: killed", life.how)
}

// writerFunc is a Writer that calls the function at each write.
type writerFunc func()

func (f writerFunc) Write(b []byte) (int, error) {
	f()
	return len(b), nil
}
