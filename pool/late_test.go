package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A coordinator gives up a write that creates a share. A later write creates the share, and a third one removes it.
// Then the first write arrives late. It must not create the share again.
func TestAWriteThatWasGivenUpNeverFollowsALaterOne(t *testing.T) {
	for name, meanwhile := range map[string]func(w *world){
		"TheEpochIsRecorded": func(*world) {},
		"TheEpochIsDeleted": func(w *world) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.revision++
			w.set(epochKey, "", true)
		},
	} {
		t.Run(name, func(t *testing.T) { neverFollows(t, meanwhile) })
	}
}

func neverFollows(t *testing.T, meanwhile func(w *world)) {
	inWorld(t, func(t *testing.T, w *world) {
		removed := func() bool { return w.value(shareKeys+"eu") == "" }
		soon := func(what string, holds func() bool) {
			require.Eventually(t, holds, 5*time.Second, time.Millisecond, what)
		}
		w.endPool()
		soon("no region has a share", removed)

		p := w.whoLeads()
		p.set(func() { p.trap = 1 })
		w.change(func(*Pool) {})
		soon("the coordinator is about to write", p.paused)
		p.set(func() { p.etcd.late = 15 * time.Second })
		p.resume()
		time.Sleep(time.Millisecond)
		meanwhile(w)
		p.set(func() { p.etcd.late = 0 })
		soon("the coordinator writes again in another session", func() bool { return !removed() })

		w.endPool()
		soon("the late share is removed", removed)
		for range 150 {
			time.Sleep(100 * time.Millisecond)
			require.True(t, removed())
		}
	})
}
