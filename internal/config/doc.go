// Package config reads the configuration of a refiller: a YAML file, over which the environment and flags are laid.
//
// Every problem is reported, not the first one alone, each as a [Problem] with its line and column, the field's path
// ("buckets[0].rate"), the value and what is allowed. Nothing is guessed or clamped: unknown and repeated fields, values
// of another type (a number where text belongs, 1.5 where a whole number does), a second document, and YAML's anchors,
// aliases, merge keys and tags are problems.
//
// # Fields
//
//	region             this replica's region: up to 128 letters, digits and any of . _ -; required with pools
//	redis.url          forms: package redisconn; required
//	redis.username, redis.password_file
//	redis.sentinel_username, redis.sentinel_password_file
//	redis.tls          {ca, cert, key}: PEM files, for the rediss forms
//	redis.dial_timeout, redis.read_timeout, redis.write_timeout    1ms to 1m, default 2s
//	redis.pool_size    most connections per server, 1 to 10000, default 32
//	version            0 or more, default 0: raise it whenever a policy changes
//	election.mode      race (default) or etcd
//	election.endpoints of etcd; required in mode etcd and with pools
//	election.prefix    of all keys in etcd, default /refiller
//	election.ttl       of the lease, whole seconds from 1s to 10m, default 5s
//	election.username, election.password_file, election.tls
//	refill_interval    1ms to 1h, default 100ms
//	buckets            at least one, or templates or pools, of
//	  key              the bucket's name: 1 to 512 bytes without a closing brace, once in the file
//	  capacity         most tokens it holds
//	  rate             tokens per time, such as 500/s; or
//	  every, tokens    so many tokens each such time; or
//	  cron, tokens     so many tokens at the times of a calendar, in time_zone (default UTC)
//	  initial          tokens of a new bucket, default its capacity
//	  interval         refill interval of this bucket, default refill_interval
//	  on_loss          empty (default) or full
//	  on_rollback      empty (default) or keep
//	  carry_over       keep (default), proportional or reset
//	  degraded         closed (default), open or local
//	  shadow           true to admit what the bucket denies, default false
//	templates          a policy for every key with a prefix, up to 256; [] ends them all. Each has of a bucket's fields all but
//	                   key, every, cron, tokens and time_zone, and
//	  prefix           of the keys, where a * stands for a segment between colons: package policy; required, "" for all keys
//	  enforce          refilled (default) or lazy; of a lazy one's fields interval, on_loss and on_rollback have no effect
//	  max_keys         most buckets of a refilled one at once, default 0: no bound
//	pools              one rate over several regions each; [] ends them all. The same in all regions:
//	  name             the key of the pool's bucket in each region: up to 128 letters, digits and any of . _ : -
//	  rate             of all regions together, such as 10000/s
//	  capacity         of all regions' buckets together
//	  interval         refill interval, default 100ms
//	  regions          by name, up to 100 of
//	    weight         part of what is short or spare, 1 to 1000000, default 1
//	    floor          rate that is always the region's; default its part, by weight, of a fifth of the rate
//	    burst          capacity of its bucket, at least two intervals of the pool's rate; default its part, by weight
//	    ceiling        the most it gets; default no limit
//	listen             host:port of the admin server, default 127.0.0.1:9090; port 0 is any free one
//	log                {level: trace|debug|info|warn|error|off, format: text|json}, default info, text
//
// # Environment
//
// A flag beats the environment, and the environment the file. An empty variable counts as unset.
//
//	REFILLER_REGION                   region
//	REFILLER_LISTEN                   listen
//	REFILLER_LOG_LEVEL                log.level
//	REFILLER_LOG_FORMAT               log.format
//	REFILLER_REDIS_URL                redis.url; with a user or password it also replaces the file's
//	REFILLER_REDIS_USERNAME           redis.username
//	REFILLER_REDIS_PASSWORD           the password itself, which no field of the file may hold
//	REFILLER_REDIS_PASSWORD_FILE      redis.password_file
//	REFILLER_REDIS_SENTINEL_PASSWORD  the sentinels' password itself
//	REFILLER_REDIS_CA, _CERT, _KEY    redis.tls.ca, .cert, .key
//	REFILLER_ELECTION_MODE            election.mode
//	REFILLER_ETCD_ENDPOINTS           election.endpoints, with commas between
//	REFILLER_ETCD_USERNAME            election.username
//	REFILLER_ETCD_PASSWORD            the password itself
//	REFILLER_ETCD_PASSWORD_FILE       election.password_file
//	REFILLER_ETCD_CA, _CERT, _KEY     election.tls.ca, .cert, .key
//
// What all replicas must agree on (version, buckets, pools, intervals) is in the file alone, or in what they share: see
// [Shared].
//
// # Secrets
//
// A username or password beside the URL is used instead of the one in it. A [Config] and its parts print with secrets
// masked, and no Problem shows one.
package config
