package refill

import (
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Bucket is a bucket to keep full.
type Bucket struct {
	Key    string
	Policy policy.Policy
	// Pooled is set for a pool's bucket. Its terms come through SetTerms, and only the interval and the flows of Policy
	// are used. Before SetTerms is called, the bucket is refilled under the terms that are in force in Redis. If it
	// doesn't exist then, it is not created.
	Pooled bool
	// Start has the terms that turn a plain bucket of a lower version into the pool's bucket. They have no grant. Nil
	// means that such a bucket stays plain.
	Start *policy.Terms
}

// Event describes a refill call and its reply.
type Event struct {
	Key     string
	Sent    time.Time // just before the call's batch was sent
	Replied time.Time // when the batch's replies had arrived
	Call    policy.Call
	Outcome policy.Outcome
	Err     error
	Flows   *FlowsRead // the demand of the bucket's flows that was read after the refill; nil for none
}

// OwnFault reports whether the call failed because of the bucket, and not because of its server.
func (e Event) OwnFault() bool { return e.Err != nil && ownFault(e.Err) }

// Config configures a Refiller.
type Config struct {
	// Redis holds the buckets. It must not be closed before Run returns. Set its ContextTimeoutEnabled. Otherwise only its
	// socket timeouts bound a call, and not Timeout.
	Redis redis.UniversalClient
	// Buckets are the buckets to keep full. Their keys must be unique.
	Buckets []Bucket
	// Templates are the published templates; nil for none. Buckets of refilled templates are refilled while they are not
	// full. Other refillers of the same Redis may have the same templates or later ones.
	Templates *policy.Templates
	// Version is the version of the configuration that the policies come from, 0 or more. A bucket never goes back to a
	// policy of an older version.
	Version int64
	// Elected makes the replica a standby except while Lead runs.
	Elected bool
	// Pulse is the beginning of the names of the pulse buckets of elected mode. Replicas of one election have the same
	// Pulse, and those of different elections different ones. Default "refiller:pulse".
	Pulse string
	// Interval is the refill interval of the pulse. Default policy.DefaultInterval.
	Interval time.Duration
	// Timeout is the time for one batch, 1 ms or more. A batch gets up to four times as long if the server is far away or
	// calls have failed, because it may have to open connections. With a higher timeout a silent server is detected later.
	// With a lower one, calls to a slow server fail. Default 500 ms.
	Timeout time.Duration
	// Batch is the most buckets in one round trip, 1 to 10000. A slow server gets fewer. Default 500.
	Batch int
	// Logger must not block, because refills wait for it. Nil means a default one named refiller.
	Logger hclog.Logger
	// Observe, if set, is called after every call for a bucket that isn't a template's, even if the call has failed. Such
	// buckets are also the pulses and the claims, whose keys begin with Pulse. Observe must be safe for concurrent use.
	Observe func(Event)
	// ObserveActive, if set, is called after every call for a template's bucket. It must be safe for concurrent use. There
	// may be a hundred thousand calls a second. If you only need their counts, Stats has them at less cost.
	ObserveActive func(Event)
	// Seed of the jitter; 0 means a random one.
	Seed uint64
}

// ErrConfig is returned for a Config that can't be used.
var ErrConfig = errors.New("refill: bad config")

func (c *Config) setDefaults() {
	if c.Pulse == "" {
		c.Pulse = "refiller:pulse"
	}
	if c.Interval == 0 {
		c.Interval = policy.DefaultInterval
	}
	if c.Timeout == 0 {
		c.Timeout = 500 * time.Millisecond
	}
	if c.Batch == 0 {
		c.Batch = 500
	}
	if c.Logger == nil {
		c.Logger = hclog.Default().Named("refiller")
	}
}

func (c *Config) validate() error {
	if redisclient.IsNil(c.Redis) {
		return fmt.Errorf("%w: Redis is nil", ErrConfig)
	}
	if err := checkVersion(c.Version); err != nil {
		return err
	}
	if c.Interval < policy.MinInterval || c.Interval > policy.MaxInterval {
		return fmt.Errorf("%w: Interval %s is not from %s to %s", ErrConfig, c.Interval, policy.MinInterval,
			policy.MaxInterval)
	}
	if c.Timeout < time.Millisecond {
		return fmt.Errorf("%w: Timeout %s is below 1ms", ErrConfig, c.Timeout)
	}
	if c.Batch < 1 || c.Batch > 10_000 {
		return fmt.Errorf("%w: Batch %d is not from 1 to 10000", ErrConfig, c.Batch)
	}
	if err := lua.CheckKey(c.Pulse); err != nil {
		return fmt.Errorf("%w: Pulse: %w", ErrConfig, err)
	}
	return checkBuckets(c.Buckets)
}

func checkVersion(version int64) error {
	if version < 0 || version > policy.MaxTokens {
		return fmt.Errorf("%w: Version %d is not from 0 to %d", ErrConfig, version, int64(policy.MaxTokens))
	}
	return nil
}

func checkBuckets(buckets []Bucket) error {
	seen := make(map[string]bool, len(buckets))
	for _, b := range buckets {
		if err := lua.CheckKey(b.Key); err != nil {
			return &BucketError{Bucket: b.Key, Err: err}
		}
		if err := b.validate(); err != nil {
			return &BucketError{Bucket: b.Key, Err: err}
		}
		if seen[b.Key] {
			return &BucketError{Bucket: b.Key, Err: fmt.Errorf("%w: it is there twice", ErrConfig)}
		}
		seen[b.Key] = true
	}
	return nil
}

func (b Bucket) validate() error {
	if !b.Pooled {
		return b.Policy.Validate()
	}
	if f := b.Policy.Flows; f != nil {
		if err := f.Validate(); err != nil {
			return err
		}
	}
	if i := b.Policy.Interval; i != 0 && (i < policy.MinInterval || i > policy.MaxInterval) {
		return fmt.Errorf("%w: interval %s is not from %s to %s", ErrConfig, i, policy.MinInterval, policy.MaxInterval)
	}
	return nil
}

// BucketError is a failure of one bucket.
type BucketError struct {
	Bucket string
	Err    error
}

// Error implements error.
func (e *BucketError) Error() string { return fmt.Sprintf("refill: bucket %q: %v", e.Bucket, e.Err) }

// Unwrap returns the cause.
func (e *BucketError) Unwrap() error { return e.Err }
