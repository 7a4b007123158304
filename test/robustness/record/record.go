// Package record defines the files of a run, a directory with files of JSON lines. They are the only input of the
// verifier. The package doesn't judge them: see package verify.
//
//	meta.json             the description of the run
//	ops.jsonl             the operations of the clients
//	samples.jsonl         the states of the buckets in Redis, read during the run
//	faults.jsonl          the faults
//	health.jsonl          checks of the system before and after each fault
//	refills-NAME.jsonl    the refill calls of one replica, which the replica writes (package history)
//	log-NAME.jsonl        the log of one replica
//
// All times are Unix nanoseconds on the clock of the machine, which every process shares.
package record

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/policy"
)

// Meta describes a run.
type Meta struct {
	Name     string        `json:"name"`
	Seed     uint64        `json:"seed"`
	Servers  string        `json:"servers"`  // single, sentinel or cluster
	Election string        `json:"election"` // race, or etcd with the number of its members
	Replicas int           `json:"replicas"`
	Faults   []string      `json:"faults"`
	Resume   time.Duration `json:"resume"` // refills must go on within this time after a fault
	Buckets  []Bucket      `json:"buckets"`

	Deployment []string      `json:"deployment,omitempty"` // the card of package deck, if the schedule is random
	Distance   time.Duration `json:"distance,omitempty"`   // round-trip time from all processes to Redis
	Later      int           `json:"later,omitempty"`      // a version that a replica gets while all replicas run
}

// Kinds of buckets.
const (
	Configured = ""         // a bucket of the configuration
	Refilled   = "refilled" // a bucket of a template whose buckets are refilled
	Lazy       = "lazy"     // a bucket of a template whose buckets are credited when they are used
	Pooled     = "pooled"   // a pool's bucket; it gets its terms at run time, and Terms has the pool's rate and capacity
	// Foreign is a bucket of the configuration that programs without the SDK use too, with plain commands.
	Foreign = "foreign"
)

// Bucket is a bucket under test.
type Bucket struct {
	Key   string   `json:"key"`
	Kind  string   `json:"kind,omitempty"`
	Terms []string `json:"terms"` // the policies of all config versions in use, as policy.Terms encodes them
	// Steps has the schedule of each policy in Terms, as policy.Steps writes it. It is empty if the policy isn't stepped.
	Steps []string `json:"steps,omitempty"`
	// Linear means that the bucket is checked for linearizability. All calls to it, except those of the replicas, are in
	// ops.jsonl.
	Linear bool `json:"linear"`
	// Plain means that programs without the SDK take from the bucket too, with plain commands.
	Plain bool `json:"plain,omitempty"`

	Blocks   int64 `json:"blocks,omitempty"`   // largest number of tokens that consumers hold in leases at a time
	Operated bool  `json:"operated,omitempty"` // an operator grants tokens to the bucket and resets it
	// Overridden means that an operator sets an override, which is the last of Terms, and removes it again.
	Overridden bool   `json:"overridden,omitempty"`
	Prefix     string `json:"prefix,omitempty"` // the prefix of the bucket's template, if that has max_keys
	MaxKeys    int    `json:"max_keys,omitempty"`
}

// Divided reports whether every policy of the bucket divides it among flows.
func (b Bucket) Divided() bool { return b.each(func(t policy.Terms) bool { return t.Divided }) }

// Strict reports whether every policy of the bucket is strict.
func (b Bucket) Strict() bool { return b.each(func(t policy.Terms) bool { return t.Strict }) }

// each reports whether condition is true for every policy of the bucket.
func (b Bucket) each(condition func(policy.Terms) bool) bool {
	policies, err := b.Policies()
	for _, t := range policies {
		if !condition(t) {
			return false
		}
	}
	return err == nil
}

// Schedules returns the schedules of the bucket's stepped policies by fence.
func (b Bucket) Schedules() (map[policy.Fence]policy.Steps, error) {
	m := map[policy.Fence]policy.Steps{}
	for i, text := range b.Terms {
		t, err := policy.DecodeTerms(text)
		if err != nil {
			return nil, fmt.Errorf("record: bucket %q: %w", b.Key, err)
		}
		if t.Kind != policy.Stepped {
			continue
		}
		m[t.Fence], err = schedule(b.Steps[i])
		if err != nil {
			return nil, fmt.Errorf("record: bucket %q: %w", b.Key, err)
		}
	}
	return m, nil
}

// schedule parses the text of a policy.Steps. It is "every 500ms", or cron's five fields and a time zone.
func schedule(text string) (policy.Steps, error) {
	if every, ok := strings.CutPrefix(text, "every "); ok {
		d, err := time.ParseDuration(every)
		return policy.Every(d), err
	}
	at := strings.LastIndexByte(text, ' ')
	if at < 0 {
		return nil, fmt.Errorf("%q is no schedule", text)
	}
	zone, err := time.LoadLocation(text[at+1:])
	if err != nil {
		return nil, err
	}
	return policy.ParseCalendar(text[:at], zone)
}

// Policies returns the bucket's terms by fence.
func (b Bucket) Policies() (map[policy.Fence]policy.Terms, error) {
	m := map[policy.Fence]policy.Terms{}
	for _, text := range b.Terms {
		t, err := policy.DecodeTerms(text)
		if err != nil {
			return nil, fmt.Errorf("record: bucket %q: %w", b.Key, err)
		}
		m[t.Fence] = t
	}
	return m, nil
}

// Kinds of operations.
const (
	Take   = "take"
	UpTo   = "upto"
	Return = "return"

	Reserve = "reserve" // a client reserves N tokens
	Settle  = "settle"  // a client settles a reservation: up to N of its tokens are returned
	Lapse   = "lapse"   // a client doesn't settle: N tokens are returned when the reservation's time is over
	Add     = "add"     // a program without the SDK adds N tokens
	Grant   = "grant"   // an operator adds N tokens
	Reset   = "reset"   // an operator sets the number of tokens to N
)

// Results of operations.
const (
	Done    = "done"
	Denied  = "denied"
	Missing = "missing" // the answer was that the bucket doesn't exist
	Failed  = "failed"  // the operation certainly had no effect
	Unknown = "unknown" // the operation may have taken effect
)

// Op is one call of a client.
type Op struct {
	Client  string `json:"client"`
	Kind    string `json:"kind"`
	Key     string `json:"key"`
	N       int64  `json:"n"`
	Call    int64  `json:"call"`
	Return  int64  `json:"return"`
	Result  string `json:"result"`
	Taken   int64  `json:"taken,omitempty"`   // tokens taken
	Clamped int64  `json:"clamped,omitempty"` // tokens of a return, settle or grant that were dropped
	Left    int64  `json:"left"`              // tokens left in the bucket
	Era     int64  `json:"era,omitempty"`     // the bucket's era, if the operation was denied; so also Index and Last
	Index   int64  `json:"index,omitempty"`
	Last    int64  `json:"last,omitempty"`
	Error   string `json:"error,omitempty"`

	Request  string `json:"request,omitempty"`  // the request id of a take that may be repeated
	Leave    int64  `json:"leave,omitempty"`    // tokens that the take must leave
	Leased   bool   `json:"leased,omitempty"`   // the answer came from a block of tokens in memory
	Shadow   bool   `json:"shadow,omitempty"`   // granted in shadow mode: the bucket lacked tokens, and none was taken
	Fallback int64  `json:"fallback,omitempty"` // tokens that the degraded mode granted while the server didn't answer
	All      bool   `json:"all,omitempty"`      // the take is one of the takes of a TakeAll
	Other    bool   `json:"other,omitempty"`    // the bucket had the tokens for a TakeAll, but another bucket denied it
}

// Sample is the state of one bucket. One call reads all of it but Expires.
type Sample struct {
	Key     string `json:"key"`
	Sent    int64  `json:"sent"`
	Got     int64  `json:"got"`
	Missing bool   `json:"missing,omitempty"` // the bucket didn't exist
	Expires bool   `json:"expires,omitempty"` // the key with the tokens has an expiry
	Tokens  int64  `json:"tokens"`
	Held    int64  `json:"held,omitempty"` // tokens in reservations and leases
	Era     int64  `json:"era"`            // 0 without control state
	Index   int64  `json:"index"`
	Last    int64  `json:"last"`
	Carry   int64  `json:"carry"`
	Policy  string `json:"policy,omitempty"` // as policy.Terms encodes it
}

// Effects of a fault on the buckets' state. If a fault has no effect, the system must keep every promise.
const (
	None     = ""
	Lose     = "lose"     // keys are deleted
	Rollback = "rollback" // the server forgot its writes between Start and Gone
	Clock    = "clock"    // the server's clock was stepped by Jump
	Forbid   = "forbid"   // no client may use the keys of one bucket
)

// Fault is something that went wrong from Start to End.
type Fault struct {
	Name   string        `json:"name"`
	Start  int64         `json:"start"`
	End    int64         `json:"end"`
	Effect string        `json:"effect,omitempty"`
	Key    string        `json:"key,omitempty"`   // lose, forbid: the bucket; empty: all
	Parts  []string      `json:"parts,omitempty"` // lose: tokens, index, control; empty: all three
	Jump   time.Duration `json:"jump,omitempty"`
	Gone   int64         `json:"gone,omitempty"`   // rollback: the former server sent its last answer before this time
	At     int64         `json:"at,omitempty"`     // rollback without a fail-over: when, on the server's clock, Unix µs
	Victim string        `json:"victim,omitempty"` // the replica that the fault struck
	Spares bool          `json:"spares,omitempty"` // some replica can refill while the fault lasts
	Note   string        `json:"note,omitempty"`
}

// Health is one check of the whole system. OK reports whether every bucket was refilled again after At.
type Health struct {
	When string        `json:"when"`
	At   int64         `json:"at"`
	OK   bool          `json:"ok"`
	Took time.Duration `json:"took"`
	Note string        `json:"note,omitempty"`
}

// Files of a run.
const (
	MetaFile    = "meta.json"
	OpsFile     = "ops.jsonl"
	SamplesFile = "samples.jsonl"
	FaultsFile  = "faults.jsonl"
	HealthFile  = "health.jsonl"
)

// RefillsFile returns the name of the file with a replica's refills.
func RefillsFile(replica string) string { return "refills-" + replica + ".jsonl" }

// LogFile returns the name of the file with a replica's log.
func LogFile(replica string) string { return "log-" + replica + ".jsonl" }

// WriteMeta writes the file with the Meta of a run.
func WriteMeta(dir string, m Meta) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, MetaFile), append(b, '\n'), 0o600)
}

// Refill is a refill call, with the replica that made it.
type Refill struct {
	Replica string
	history.Refill
}

// Lead is the beginning of a replica's term, from its log.
type Lead struct {
	Election string // the module that logged it, which is different for each election
	Replica  string
	At       int64
	Epoch    int64
}

// Reading is an entry of a replica's log which says that the replica began to use a configuration.
type Reading struct {
	Replica string
	At      int64
	Version int64
	Starts  bool // the replica has just started, and isn't connected yet
}

// Line is an entry of a replica's log about a bucket.
type Line struct {
	Replica string
	At      int64
	Message string
	Bucket  string
}

// Run is the complete record of a run.
type Run struct {
	Dir     string
	Meta    Meta
	Ops     []Op
	Samples []Sample
	Faults  []Fault
	Health  []Health
	Refills []Refill
	Leads   []Lead
	Lines   []Line
	Files   []Reading
}

// Load reads the record of a run.
func Load(dir string) (*Run, error) {
	r := &Run{Dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, MetaFile))
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if err := json.Unmarshal(b, &r.Meta); err != nil {
		return nil, fmt.Errorf("record: %s: %w", MetaFile, err)
	}
	r.Ops, err = ReadLines[Op](filepath.Join(dir, OpsFile))
	if err != nil {
		return nil, err
	}
	r.Samples, err = ReadLines[Sample](filepath.Join(dir, SamplesFile))
	if err != nil {
		return nil, err
	}
	r.Faults, err = ReadLines[Fault](filepath.Join(dir, FaultsFile))
	if err != nil {
		return nil, err
	}
	r.Health, err = ReadLines[Health](filepath.Join(dir, HealthFile))
	if err != nil {
		return nil, err
	}
	r.Refills, err = LoadRefills(dir)
	if err != nil {
		return nil, err
	}
	return r, r.readLogs()
}

// LoadRefills reads the refill calls of all replicas.
func LoadRefills(dir string) ([]Refill, error) {
	files, err := filepath.Glob(filepath.Join(dir, RefillsFile("*")))
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	var all []Refill
	for _, file := range files {
		refills, err := ReadLines[history.Refill](file)
		if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "refills-"), ".jsonl")
		for _, f := range refills {
			all = append(all, Refill{name, f})
		}
	}
	return all, nil
}

// readLogs reads the replicas' logs for the beginnings of terms, for configurations that were read, and for entries
// about buckets. It skips lines that aren't JSON, such as the lines of a panic.
func (r *Run) readLogs() error {
	files, err := filepath.Glob(filepath.Join(r.Dir, LogFile("*")))
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("record: %w", err)
		}
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "log-"), ".jsonl")
		for _, line := range strings.Split(string(b), "\n") {
			var entry struct {
				Message string    `json:"@message"`
				At      time.Time `json:"@timestamp"`
				Module  string    `json:"@module"`
				Epoch   int64     `json:"epoch"`
				Version int64     `json:"version"`
				Bucket  string    `json:"bucket"`
			}
			switch {
			case json.Unmarshal([]byte(line), &entry) != nil:
			case entry.Message == "leading":
				r.Leads = append(r.Leads, Lead{entry.Module, name, entry.At.UnixNano(), entry.Epoch})
			case entry.Message == "replica starts" || entry.Message == "config reloaded":
				r.Files = append(r.Files, Reading{name, entry.At.UnixNano(), entry.Version,
					entry.Message == "replica starts"})
			case entry.Bucket != "":
				r.Lines = append(r.Lines, Line{name, entry.At.UnixNano(), entry.Message, entry.Bucket})
			}
		}
	}
	return nil
}
