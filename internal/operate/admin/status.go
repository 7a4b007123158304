package admin

import (
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
)

// Query selects buckets.
type Query struct {
	Key    string // only this bucket, if not empty
	Search string // only buckets whose key contains it, in upper or lower case
	Sort   Sort
	Offset int // how many of the found buckets to skip
	Limit  int // most buckets to list; 0: none
	Flows  int // how many flows of each bucket to list
}

// Sort is the order of buckets.
type Sort string

// The orders. SortFill, SortTaken and SortAge read every bucket from Redis. If more than MaxSorted buckets are found,
// the order is that of the configuration instead.
const (
	SortConfig Sort = ""      // as configured
	SortKey    Sort = "key"   // by key
	SortFill   Sort = "fill"  // the emptiest first
	SortTaken  Sort = "taken" // the most taken from first
	SortAge    Sort = "age"   // the longest without a refill first
)

// MaxSorted is the largest number of buckets that can be ordered by values in Redis.
const MaxSorted = 2000

var sorts = []Sort{SortConfig, SortKey, SortFill, SortTaken, SortAge}

// Status is the content of /status. Times are RFC 3339; ages are in milliseconds.
type Status struct {
	Identity string           `json:"identity"`
	Region   string           `json:"region,omitempty"`
	Version  string           `json:"build"`
	Mode     string           `json:"mode"`
	Config   int64            `json:"config_version"`
	Redis    string           `json:"redis"`
	Started  time.Time        `json:"started"`
	Now      time.Time        `json:"now"`
	Leading  bool             `json:"leading"`         // this replica leads
	Racing   bool             `json:"racing"`          // this replica refills in place of a silent leader
	Epoch    int64            `json:"epoch,omitempty"` // of this replica's present or last term
	Leader   *Leader          `json:"leader,omitempty"`
	Election string           `json:"election_error,omitempty"` // why the leader isn't known
	Unknown  bool             `json:"leader_unknown,omitempty"` // etcd doesn't answer, so there may be a leader or not
	Calls    map[string]int64 `json:"calls"`                    // this replica's refill calls by their answer
	Errors   int64            `json:"errors"`                   // calls without an answer
	Faults   int64            `json:"faults"`                   // calls for buckets that are malformed or forbidden
	Added    int64            `json:"tokens_added"`
	Clamped  int64            `json:"tokens_clamped"`
	Buckets  []Bucket         `json:"buckets"`
	Found    int              `json:"buckets_found"` // how many match the query; Buckets has a part of them
	Total    int              `json:"buckets_total"` // configured
	Pooled   int              `json:"-"`             // how many of Total are of pools

	Templates []Template `json:"templates,omitempty"` // those whose buckets are refilled

	Reload    Reload     `json:"reload"`
	Away      string     `json:"redis_error,omitempty"`       // why refills pause; empty: they don't
	Conflicts Mismatch   `json:"conflicts"`                   // under the same version: only a higher one helps
	Outdated  Mismatch   `json:"outdated"`                    // under a later version: the file is ignored
	Troubles  []Trouble  `json:"faults_of_buckets,omitempty"` // errors of the last calls about configured buckets
	Takeovers []Takeover `json:"takeovers"`                   // the last ones, the newest first

	Pools *Pools `json:"pools,omitempty"` // nil: the replica takes no part in pools

	Replicas []Replica `json:"replicas"`                 // the living replicas of this region, by identity
	Unlisted string    `json:"replicas_error,omitempty"` // why they aren't known
}

// Role describes in words what a replica does.
func Role(leading, racing, elected bool) string {
	switch {
	case leading:
		return "leads"
	case racing:
		return "stands in for a silent leader"
	case elected:
		return "stands by"
	}
	return "races"
}

// Role returns the role of the replica that answers.
func (s Status) Role() string { return Role(s.Leading, s.Racing, s.Mode == "etcd") }

// Replica is a replica, as it describes itself every few seconds.
type Replica struct {
	Identity string    `json:"identity"`
	Build    string    `json:"build"`
	Role     string    `json:"role"`
	Config   int64     `json:"config_version"`
	Started  time.Time `json:"started"`
	Silent   float64   `json:"silent_ms"` // since its last report; a dead replica stays listed for some seconds
	Late     bool      `json:"late"`      // its next report is overdue
}

// Template is what this replica does for the buckets of a template.
type Template struct {
	Prefix  string `json:"prefix"`
	Shards  int    `json:"shards"`         // how many of the 16 shards of its active set this replica refills
	Active  int64  `json:"active_buckets"` // in those shards: buckets that are not full
	Refills int64  `json:"refills"`        // by this replica
	Errors  int64  `json:"errors"`         // this replica's calls without an answer, or for forbidden or failing buckets

	Most []Active `json:"most_active,omitempty"` // those with the most refills in the last half minute or more
}

// Active is a bucket of a template with its refilled tokens, which are as many as were taken from it.
type Active struct {
	Key  string  `json:"key"`
	Rate float64 `json:"tokens_per_second"`
}

// Trouble is a reason for which some buckets could not be refilled.
type Trouble struct {
	Why     string   `json:"why"`
	Total   int      `json:"total"`
	Buckets []string `json:"buckets"` // the first ones by key
}

// Pools are the pools of all regions as a replica of one region sees them.
type Pools struct {
	Coordinating bool    `json:"coordinating"`          // this replica hands out the shares
	Epoch        int64   `json:"epoch,omitempty"`       // pool epoch under which this replica writes shares, or last did
	Coordinator  *Leader `json:"coordinator,omitempty"` // of all regions
	Election     string  `json:"election_error,omitempty"`
	Cut          string  `json:"etcd_error,omitempty"`  // why etcd doesn't answer
	Away         string  `json:"redis_error,omitempty"` // why there are no tickets
	Shares       []Share `json:"shares"`                // of the replica's region
}

// Share is a region's part in a pool, as it is stored in the region's own Redis. Rates are tokens per second.
type Share struct {
	Pool      string  `json:"pool"`
	Limit     float64 `json:"limit"`  // the pool's rate; 0 once it has left the configuration
	Rate      float64 `json:"rate"`   // in force
	Floor     float64 `json:"floor"`  // always the region's
	Demand    float64 `json:"demand"` // rate that the region could use (computed by the coordinator)
	Tokens    int64   `json:"tokens"`
	Capacity  int64   `json:"capacity"`                // of the region's bucket
	Age       float64 `json:"grant_age_seconds"`       // since the grant was made or last renewed
	Remaining float64 `json:"grant_remaining_seconds"` // until the grant ends; 0: the region is on its floor

	Trend   ShareTrend    `json:"-"` // of the last quarter of an hour, for the page
	Regions []RegionShare `json:"-"` // all regions of the pool by name, for the page; none if they aren't known
}

// RegionShare is the history of a region's share of a pool in the last quarter of an hour.
type RegionShare struct {
	Region string
	Trend  ShareTrend
}

// ShareHistory is the history of a region's share of a pool in the last hour, as this replica recorded it.
type ShareHistory struct {
	Pool   string `json:"pool"`
	Region string `json:"region"`
	// Minutes are averages in parts of the pool's rate, the oldest first. The last minute is not over yet. Null: not
	// known.
	Minutes []*float64 `json:"minutes"`
}

// Grant describes the state of the region's grant.
func (s Share) Grant() string { return Grant(s.Age, s.Remaining) }

// Renewed reports whether the grant is renewed in time.
func (s Share) Renewed() bool { return s.Remaining > 0 && s.Age < overdue }

// overdue is the age in seconds from which the renewal of a grant is overdue. Grants are renewed about once a second.
const overdue = 4

// Grant describes the state of a grant that was renewed age seconds ago and ends after remaining seconds unless it is
// renewed again.
func Grant(age, remaining float64) string {
	switch {
	case remaining <= 0:
		return "on its floor"
	case age < overdue:
		return fmt.Sprintf("renewed %.1f s ago", age)
	}
	return fmt.Sprintf("not renewed, ends in %.0f s", remaining)
}

// Reload describes the reloads of the configuration. The fields of the last reload are empty before the first one.
type Reload struct {
	At       time.Time `json:"at,omitzero"`
	Cause    string    `json:"cause,omitempty"`
	Result   string    `json:"result,omitempty"` // applied, unchanged or refused
	Problems []string  `json:"problems,omitempty"`
	Restart  []string  `json:"restart_needed,omitempty"` // fields whose change needs a restart

	Applied   int64 `json:"applied"`
	Unchanged int64 `json:"unchanged"`
	Refused   int64 `json:"refused"`
}

// Mismatch lists where another policy is in force than that of this replica's configuration.
type Mismatch struct {
	Total     int      `json:"total"`               // number of buckets, plus one each for templates and pools
	Buckets   []string `json:"buckets,omitempty"`   // the first ones by key
	Templates string   `json:"templates,omitempty"` // the templates that are in force, or empty
	Pools     string   `json:"pools,omitempty"`
}

// Takeover is a period in which this replica began to refill buckets that another replica had refilled before.
type Takeover struct {
	At      time.Time `json:"at"`
	Buckets int       `json:"buckets"`
	Gap     float64   `json:"gap_ms"` // the longest time that one of them went without a refill
}

// Leader is the leader according to the election service.
type Leader struct {
	Identity string `json:"identity"`
	Epoch    int64  `json:"epoch"`

	Since time.Time `json:"since"` // since when this replica knows it as the leader
}

// Bucket is the state of a bucket in Redis, with the policy in force there.
type Bucket struct {
	Key      string  `json:"key"`
	Tokens   int64   `json:"tokens"`
	Capacity int64   `json:"capacity"`
	Rate     string  `json:"rate,omitempty"`
	Schedule string  `json:"schedule,omitempty"`
	Index    int64   `json:"index"`
	Era      int64   `json:"era"`
	Policy   int64   `json:"policy_version"`
	Age      float64 `json:"refill_age_ms"` // since the last refill, on Redis' clock
	Error    string  `json:"error,omitempty"`

	// Differences of this replica's configuration from the policy in force. The other fields show the policy in force.
	Differs []config.Difference `json:"differs,omitempty"`
	// Conflict reports that the policy differs under the same version. Outdated reports that the version of the replica's
	// policy is below the one in force.
	Conflict bool `json:"conflict,omitempty"`
	Outdated bool `json:"outdated,omitempty"`
	// Override reports that the key has its own policy in force, whatever the configuration says.
	Override bool `json:"override,omitempty"`

	Outstanding int64 `json:"outstanding_tokens"`    // held by consumers in reservations and leases
	Debt        int64 `json:"debt_tokens,omitempty"` // that refills pay back before they add tokens

	// Recent values; only from the replica that refills the bucket.
	Taken *float64 `json:"taken_per_second,omitempty"`
	Dry   *float64 `json:"found_empty,omitempty"` // part of the refills that found no token: takes were probably denied

	// How the bucket is divided. It is nil if the bucket isn't divided, or if this replica has not read it.
	Flows *Flows `json:"flows,omitempty"`

	Trend Trend `json:"-"` // of the last quarter of an hour, for the page
}

// Flows describes how a bucket is divided, and how much its flows took during the last minute. The replica that refills
// the bucket reads this. If several replicas race for the refills, each reads a part.
type Flows struct {
	Seen    int     `json:"seen"`                    // flows that are distinguished
	Listed  int     `json:"listed"`                  // flows of the last plan; they ask for more than half of their part
	Level   float64 `json:"level_tokens_per_second"` // what a flow of weight 1, or a team, may have
	Covered float64 `json:"covered_seconds"`         // seconds of the last minute that this replica has read
	List    []Flow  `json:"list"`                    // by the tokens that they got, the most first
	Others  *Flow   `json:"others,omitempty"`        // the sum of the other flows; nil if they asked for nothing
}

// Flow has the rates of a flow in the last minute, in tokens per second. Denials that clients remember are not
// included.
type Flow struct {
	Name   string  `json:"name"` // name of a team, with a slash at its end, for flows that aren't distinguished
	Got    float64 `json:"got_per_second"`
	Demand float64 `json:"demand_per_second"` // the rate that it asked for
	Denied float64 `json:"denied_per_second"`
	Listed bool    `json:"listed"`
}

// Label returns the name to show.
func (f Flow) Label() string {
	switch {
	case f.Name == "":
		return "(no name)"
	case strings.HasSuffix(f.Name, "/"):
		return f.Name + " (others)"
	}
	return f.Name
}

// PerSecond formats a rate of a flow.
func PerSecond(rate float64) string {
	if rate >= 1000 {
		return fmt.Sprintf("%.0f/s", rate)
	}
	return fmt.Sprintf("%.3g/s", rate)
}

// Trend is the history of a bucket in periods of the same length, the oldest first. It is empty if the history isn't
// known.
type Trend []TrendPoint

// TrendPoint is the state of a bucket in a period.
type TrendPoint struct {
	Known bool    // otherwise this replica got no reply about the bucket
	Fill  float64 // tokens as a part of the capacity
	Taken float64 // tokens per second
}

// Fill returns the tokens as a part of the capacity.
func (b Bucket) Fill() float64 {
	if b.Capacity == 0 {
		return 0
	}
	return float64(b.Tokens) / float64(b.Capacity)
}
