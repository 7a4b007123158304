package history_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

func event(key string) refill.Event {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500)}.Terms(policy.Fence{Epoch: 3})
	return refill.Event{
		Key: key, Sent: time.Unix(1, 2), Replied: time.Unix(1, 5),
		Call: policy.Call{Version: policy.Version{Era: 7, Index: 8}, Create: policy.CreateLost, Terms: &terms, Step: 1,
			Next: 2},
		Outcome: policy.Outcome{Status: policy.StatusApplied, Version: policy.Version{Era: 7, Index: 9}, Added: 50,
			Elapsed: 100_000},
	}
}

func TestARefillIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "refills.jsonl")
	w, err := history.Open(path)
	require.NoError(t, err)
	answered, failed := event("a"), event("b")
	failed.Err = errors.New("no answer")
	w.Add(history.OfEvent(answered))
	w.Add(history.OfEvent(failed))
	require.NoError(t, w.Close())
	require.NoError(t, w.Close())

	got, err := record.ReadLines[history.Refill](path)
	require.NoError(t, err)
	require.Len(t, got, 2)
	call, err := record.Refill{Refill: got[0]}.Call()
	require.NoError(t, err)
	require.Equal(t, answered.Call, call)
	require.Equal(t, answered.Outcome, *got[0].Outcome)
	require.EqualValues(t, 3, got[0].Replied-got[0].Sent)
	require.Nil(t, got[1].Outcome)
	require.Equal(t, "no answer", got[1].Error)
}

func TestConcurrentWritersOfOneFileKeepTheirLinesWhole(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "refills.jsonl")
	var wg sync.WaitGroup
	for range 4 {
		w, err := history.Open(path)
		require.NoError(t, err)
		wg.Go(func() {
			for range 500 {
				w.Add(history.OfEvent(event("a")))
			}
		})
		t.Cleanup(func() { require.NoError(t, w.Close()) })
		defer func() { require.NoError(t, w.Close()) }()
	}
	wg.Wait()
	require.Eventually(t, func() bool {
		got, err := record.ReadLines[history.Refill](path)
		return err == nil && len(got) == 2000
	}, 20*time.Second, time.Millisecond, "added refills reach the file without Close")
}

func TestALineCutByAKillIsNoRecord(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "refills.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(`{"key":"a"}`+"\n"+`{"key":"b`), 0o600))
	got, err := record.ReadLines[history.Refill](path)
	require.NoError(t, err)
	require.Len(t, got, 1)

	require.NoError(t, os.WriteFile(path, []byte("{\"key\":\n{}\n"), 0o600))
	_, err = record.ReadLines[history.Refill](path)
	require.ErrorContains(t, err, ":1:")
}

func TestAFileThatCannotBeMadeIsAnError(t *testing.T) {
	t.Parallel()
	_, err := history.Open(filepath.Join(t.TempDir(), "missing", "refills.jsonl"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
