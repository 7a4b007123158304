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
	Search string // only buckets whose key contains this text, ignoring case
	Sort   Sort
	Offset int // how many of the found buckets to skip
	Limit  int // the largest number of buckets to list; 0 lists none
	Flows  int // how many flows of each bucket to list
}

// Sort is the order of buckets.
type Sort string

// These are the orders. SortFill, SortTaken and SortAge read every bucket from Redis. If more than MaxSorted buckets
// are found, they are in the order of the configuration instead.
const (
	SortConfig Sort = ""      // as configured
	SortKey    Sort = "key"   // by key
	SortFill   Sort = "fill"  // the emptiest first
	SortTaken  Sort = "taken" // the highest rate of takes first
	SortAge    Sort = "age"   // the longest time without a refill first
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
	Unknown  bool             `json:"leader_unknown,omitempty"` // etcd doesn't answer, so there may or may not be a leader
	Calls    map[string]int64 `json:"calls"`                    // this replica's refill calls by the status of their reply
	Errors   int64            `json:"errors"`                   // calls without a reply
	Faults   int64            `json:"faults"`                   // calls for buckets that are malformed or forbidden
	Added    int64            `json:"tokens_added"`
	Clamped  int64            `json:"tokens_clamped"`
	Buckets  []Bucket         `json:"buckets"`
	Found    int              `json:"buckets_found"` // number that match the query; Buckets lists some of them
	Total    int              `json:"buckets_total"` // number in the configuration
	Pooled   int              `json:"-"`             // how many of Total belong to pools

	Templates []Template `json:"templates,omitempty"` // only templates whose buckets are refilled

	Reload    Reload     `json:"reload"`
	Away      string     `json:"redis_error,omitempty"`       // why refills pause; empty if they don't
	Conflicts Mismatch   `json:"conflicts"`                   // policies that differ under the same version
	Outdated  Mismatch   `json:"outdated"`                    // policies in force under a later version
	Troubles  []Trouble  `json:"faults_of_buckets,omitempty"` // errors of the last calls about configured buckets
	Takeovers []Takeover `json:"takeovers"`                   // the last ones, the newest first

	Pools *Pools `json:"pools,omitempty"` // nil if the replica takes no part in pools

	Replicas []Replica `json:"replicas"`                 // the living replicas of this region, by identity
	Unlisted string    `json:"replicas_error,omitempty"` // why the replicas aren't known
}

// Role returns words that describe what a replica does.
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

// Role returns words that describe what this replica does.
func (s Status) Role() string { return Role(s.Leading, s.Racing, s.Mode == "etcd") }

// Replica is the description that a replica publishes of itself every few seconds.
type Replica struct {
	Identity string    `json:"identity"`
	Build    string    `json:"build"`
	Role     string    `json:"role"`
	Config   int64     `json:"config_version"`
	Started  time.Time `json:"started"`
	Silent   float64   `json:"silent_ms"` // since its last report; a dead replica stays listed for some seconds
	Late     bool      `json:"late"`      // its next report is overdue
}

// Template describes the work of this replica for the buckets of a template.
type Template struct {
	Prefix  string `json:"prefix"`
	Shards  int    `json:"shards"`         // number of shards, among the 16 of the active set, that this replica refills
	Active  int64  `json:"active_buckets"` // buckets in those shards that are not full
	Refills int64  `json:"refills"`        // by this replica
	Errors  int64  `json:"errors"`         // this replica's calls without a reply, or for forbidden or failing buckets

	Most []Active `json:"most_active,omitempty"` // the buckets with the most refilled tokens in the last 30 to 60 seconds
}

// Active is a bucket of a template with the rate at which it is refilled. Its tokens are taken at the same rate.
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

// Pools has the information that a replica has about the pools.
type Pools struct {
	Coordinating bool    `json:"coordinating"`          // this replica hands out the shares
	Epoch        int64   `json:"epoch,omitempty"`       // pool epoch under which this replica writes or last wrote shares
	Coordinator  *Leader `json:"coordinator,omitempty"` // of all regions
	Election     string  `json:"election_error,omitempty"`
	Cut          string  `json:"etcd_error,omitempty"`  // why etcd doesn't answer
	Away         string  `json:"redis_error,omitempty"` // why the tickets can't be read from Redis
	Shares       []Share `json:"shares"`                // of the replica's region
}

// Share is a region's part in a pool, as it is stored in the region's own Redis. Rates are tokens per second.
type Share struct {
	Pool      string  `json:"pool"`
	Limit     float64 `json:"limit"`  // the pool's rate; 0 if the pool was removed from the configuration
	Rate      float64 `json:"rate"`   // in force
	Floor     float64 `json:"floor"`  // part of the rate that the region always has
	Demand    float64 `json:"demand"` // rate that the region could use (computed by the coordinator)
	Tokens    int64   `json:"tokens"`
	Capacity  int64   `json:"capacity"`                // of the region's bucket
	Age       float64 `json:"grant_age_seconds"`       // since the grant was made or last renewed
	Remaining float64 `json:"grant_remaining_seconds"` // until the grant ends; 0 if the region has only its floor

	Trend   ShareTrend    `json:"-"` // of the last quarter of an hour, for the page
	Regions []RegionShare `json:"-"` // all regions of the pool by name, for the page; empty if the regions aren't known
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
	// Minutes has the average of the share in each minute, as a part of the pool's rate, the oldest first. The last
	// minute is not over yet. The value of a minute that isn't known is null.
	Minutes []*float64 `json:"minutes"`
}

// Grant describes the state of the region's grant.
func (s Share) Grant() string { return Grant(s.Age, s.Remaining) }

// Renewed reports whether the grant is renewed in time.
func (s Share) Renewed() bool { return s.Remaining > 0 && s.Age < overdue }

// overdue is the age in seconds at which the renewal of a grant becomes overdue. Grants are renewed about once a
// second.
const overdue = 4

// Grant describes the state of a grant that was renewed age seconds ago. Without another renewal the grant ends after
// remaining seconds.
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

// Mismatch describes where the policies in force differ from this replica's configuration.
type Mismatch struct {
	Total     int      `json:"total"`               // number of buckets, plus 1 each if Templates or Pools isn't empty
	Buckets   []string `json:"buckets,omitempty"`   // the first ones by key
	Templates string   `json:"templates,omitempty"` // how the templates in force differ; empty if they don't
	Pools     string   `json:"pools,omitempty"`
}

// Takeover is a period in which this replica began to refill buckets that another replica had refilled before.
type Takeover struct {
	At      time.Time `json:"at"`
	Buckets int       `json:"buckets"`
	Gap     float64   `json:"gap_ms"` // longest time without a refill among these buckets
}

// Leader is the leader according to the election service.
type Leader struct {
	Identity string `json:"identity"`
	Epoch    int64  `json:"epoch"`

	Since time.Time `json:"since"` // when this replica first read that this is the leader
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

	// Differs has the differences between this replica's configuration and the policy in force. The other fields show
	// the policy in force.
	Differs []config.Difference `json:"differs,omitempty"`
	// Conflict reports whether the policies differ under the same version. Outdated reports whether the replica's
	// policy has a lower version than the one in force.
	Conflict bool `json:"conflict,omitempty"`
	Outdated bool `json:"outdated,omitempty"`
	// Override reports whether an override of the key is in force. The configuration doesn't change it.
	Override bool `json:"override,omitempty"`

	Outstanding int64 `json:"outstanding_tokens"`    // held by consumers in reservations and leases
	Debt        int64 `json:"debt_tokens,omitempty"` // tokens that refills pay back before they add new ones

	// Taken and Dry are recent values. Only the replica that refills the bucket has them.
	Taken *float64 `json:"taken_per_second,omitempty"`
	Dry   *float64 `json:"found_empty,omitempty"` // part of the refills that found no token: takes were probably denied

	// Flows describes how the bucket is divided. It is nil if the bucket isn't divided, or if this replica has not read
	// it.
	Flows *Flows `json:"flows,omitempty"`

	Trend Trend `json:"-"` // of the last quarter of an hour, for the page
}

// Flows describes how a bucket is divided, and how many tokens its flows took during the last minute. The replica that
// refills the bucket reads these counts. If several replicas race for the refills, each reads a part of them.
type Flows struct {
	Seen    int     `json:"seen"`                    // number of flows that are counted separately
	Listed  int     `json:"listed"`                  // flows of the last plan, which ask for more than half of their part
	Level   float64 `json:"level_tokens_per_second"` // rate that a flow of weight 1, or a team, may have
	Covered float64 `json:"covered_seconds"`         // the part of the last minute for which this replica has read counts
	List    []Flow  `json:"list"`                    // by the tokens that they got, the most first
	Others  *Flow   `json:"others,omitempty"`        // the sum of the other flows; nil if they asked for nothing
}

// Flow has the rates of a flow in the last minute, in tokens per second. Denials that clients remember are not
// included.
type Flow struct {
	Name   string  `json:"name"` // of the flow; TEAM/ is for flows of a team that are not counted separately
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
	Known bool    // whether this replica got a reply about the bucket
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
