package membership

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// Beat is the time between two reports of a replica.
	Beat = 3 * time.Second
	// Late is the time without a report after which a replica is probably dead. The list may be a Beat old, and the
	// report in it may be older by another Beat.
	Late = 2*Beat + time.Second
	// Silence is the time without a report after which a replica is no longer listed.
	Silence = 10 * time.Second
	// Most is the largest number of replicas in a list.
	Most = 64

	timeout = time.Second // of a call
)

//go:embed members.lua
var source string

var script = redis.NewScript(source)

var errReply = errors.New("membership: unexpected reply")

// Entry is a replica's description of itself.
type Entry struct {
	Identity string    `json:"identity"`
	Build    string    `json:"build"`
	Role     string    `json:"role"`
	Version  int64     `json:"version"` // of its configuration
	Started  time.Time `json:"started"`
}

// Replica is an Entry with the time of its last report.
type Replica struct {
	Entry
	LastReport time.Time // on this host's clock
}

// Members is a replica's view of the list. The method Replicas may be called concurrently with Run.
type Members struct {
	rdb      redis.UniversalClient
	key      string
	self     func() Entry
	lastText string // written by the previous call

	mu       sync.Mutex
	replicas []Replica
	err      error
}

// New makes the Members of a list at a key of Redis. The replica writes the result of self into it.
func New(rdb redis.UniversalClient, key string, self func() Entry) *Members {
	return &Members{rdb: rdb, key: key, self: self, err: errors.New("nothing has been read yet")}
}

// Replicas returns the replicas that have reported within Silence, by identity. The list is at most a Beat old. The
// error is the reason why the replicas aren't known.
func (r *Members) Replicas() ([]Replica, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.replicas, r.err
}

// Run writes the replica's entry until ctx ends, and then removes the entry.
func (r *Members) Run(ctx context.Context) {
	pace := time.NewTicker(Beat)
	defer pace.Stop()
	for {
		r.beat(ctx)
		select {
		case <-pace.C:
		case <-ctx.Done():
			_, _ = r.call(context.WithoutCancel(ctx), "") // if this fails, the other replicas drop the entry after Silence
			return
		}
	}
}

func (r *Members) beat(ctx context.Context) {
	text, err := json.Marshal(r.self())
	var replicas []Replica
	if err == nil {
		replicas, err = r.call(ctx, string(text))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replicas, r.err = replicas, err
}

// call writes text as the replica's entry. If text is empty, it removes the entry.
func (r *Members) call(ctx context.Context, text string) ([]Replica, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	last := r.lastText
	if text != "" {
		r.lastText = text // Redis may store the entry even if the reply is lost
	}
	reply, err := script.Run(ctx, r.rdb, []string{r.key}, last, text, Silence.Milliseconds(), Most).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("members: %w", err)
	}
	return decode(reply, time.Now())
}

// decode decodes the script's reply. at is the time at which the reply came.
func decode(reply []string, at time.Time) ([]Replica, error) {
	if len(reply)%2 != 1 {
		return nil, errReply
	}
	now, err := strconv.ParseInt(reply[0], 10, 64)
	if err != nil {
		return nil, errReply
	}
	latest := map[string]Replica{} // the list may have two entries of a replica: one from before a crash, and one after it
	for i := 1; i+1 < len(reply); i += 2 {
		var e Entry
		written, err := strconv.ParseInt(reply[i+1], 10, 64)
		if err != nil || json.Unmarshal([]byte(reply[i]), &e) != nil {
			continue // another version of the program may write other entries
		}
		report := at.Add(time.Duration(written-now) * time.Millisecond)
		if report.After(latest[e.Identity].LastReport) {
			latest[e.Identity] = Replica{e, report}
		}
	}
	list := make([]Replica, 0, len(latest))
	for _, r := range latest {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Replica) int { return strings.Compare(a.Identity, b.Identity) })
	return list, nil
}
