package doctor

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/timing"
)

// Level is the severity of a finding.
type Level string

// These are the levels, in the order of their severity.
const (
	OK      Level = "ok"
	Unknown Level = "unknown" // the check could not be made
	Warning Level = "warning" // a refiller works, but at a risk
	Failure Level = "failure" // a refiller can't work like this
)

// Finding is the result of one check.
type Finding struct {
	Check  string `json:"check"`
	Level  Level  `json:"level"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"` // what to do next
}

const (
	// slow is the round-trip time above which refills come late.
	slow = 50 * time.Millisecond
	// skewed is the difference of clocks above which the times in logs mislead. The difference affects no tokens.
	skewed = 2 * time.Second
	// drift is the largest expected deviation of a clock during the checks.
	drift = 50 * time.Millisecond
)

// Redis checks whether a server suits a user with a role. A Cluster is checked through one of its nodes. The advice
// about the user's rights is for names.
func Redis(ctx context.Context, rdb redis.UniversalClient, role Role, names Names) []Finding {
	first := reach(ctx, rdb)
	if first.Level == Failure {
		return []Finding{first}
	}
	info, infoErr := information(ctx, rdb)
	return []Finding{first, versionFinding(info, infoErr), bounded(ctx, rdb),
		scripts(ctx, rdb, role, names), eviction(info, infoErr), durability(info, infoErr), clock(ctx, rdb)}
}

func reach(ctx context.Context, rdb redis.UniversalClient) Finding {
	f := Finding{Check: "redis answers", Level: OK}
	if err := rdb.Ping(ctx).Err(); err != nil {
		f.Level = Failure
		f.Detail = err.Error()
		f.Advice = "check redis.url, the network, TLS and the password"
		var answer redis.Error
		if errors.As(err, &answer) && !redis.HasErrorPrefix(answer, "WRONGPASS") && !redis.HasErrorPrefix(answer, "NOAUTH") {
			f.Advice = "Redis replies, but refuses commands: read its log"
		}
		return f
	}
	began, n := time.Now(), 5
	for range n {
		if err := rdb.Ping(ctx).Err(); err != nil {
			f.Level = Failure
			f.Detail = err.Error()
			f.Advice = "the connection is unstable: check the network"
			return f
		}
	}
	trip := time.Since(began) / time.Duration(n)
	f.Detail = fmt.Sprintf("a round trip takes %s", trip.Round(time.Microsecond))
	if trip > slow {
		f.Level, f.Advice = Warning, "run refillers closer to Redis: refills come late above "+slow.String()
	}
	return f
}

// information reads INFO. The smallest rights don't include that command.
func information(ctx context.Context, rdb redis.UniversalClient) (map[string]string, error) {
	text, err := rdb.Info(ctx, "everything").Result()
	if err != nil {
		return nil, err
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), ":"); found {
			info[name] = value
		}
	}
	return info, nil
}

const askInfo = "run the doctor as a user that may call INFO to find out"

func versionFinding(info map[string]string, err error) Finding {
	f := Finding{Check: "version", Level: OK}
	if err != nil {
		f.Level = Unknown
		f.Detail = err.Error()
		f.Advice = askInfo
		return f
	}
	name := "Redis"
	text := info["redis_version"]
	least := "7.0"
	if v := info["valkey_version"]; v != "" {
		name = "Valkey"
		text = v
		least = "7.2"
	}
	f.Detail = name + " " + text
	if before(text, least) {
		f.Level = Failure
		f.Advice = "use Redis 7.0 or later, or Valkey 7.2 or later"
	}
	return f
}

// bounded checks whether the server has INCREX. With this command, programs that use only the two keys of a bucket can
// take tokens.
func bounded(ctx context.Context, rdb redis.UniversalClient) Finding {
	found, err := rdb.Do(ctx, "command", "info", "increx").Slice()
	return boundedFinding(found, err)
}

// boundedFinding returns the finding for a reply to COMMAND INFO. The reply has nil in the place of an unknown command.
func boundedFinding(found []any, err error) Finding {
	f := Finding{Check: "INCREX", Level: OK}
	switch {
	case err != nil:
		f.Level = Unknown
		f.Detail = err.Error()
		f.Advice = "run the doctor as a user that may call COMMAND INFO to find out"
	case len(found) == 1 && found[0] != nil:
		f.Detail = "the server has INCREX, with which plain clients can take (the doctor has not tried it)"
	default:
		f.Detail = "the server has no INCREX (new in Redis 8.8 and Valkey 9.2): plain clients take with DECRBY"
	}
	return f
}

// before compares the first two numbers of versions.
func before(a, b string) bool {
	number := func(s string) int {
		major, rest, _ := strings.Cut(s, ".")
		minor, _, _ := strings.Cut(rest, ".")
		x, _ := strconv.Atoi(major) // a part that is not a number counts as 0
		y, _ := strconv.Atoi(minor)
		return 1000*x + y
	}
	return number(a) < number(b)
}

// scripts runs the scripts of a role, on separate buckets.
func scripts(ctx context.Context, rdb redis.UniversalClient, role Role, names Names) Finding {
	f := Finding{Check: "scripts and rights", Level: OK,
		Detail: fmt.Sprintf("all operations of a %s succeeded on the bucket %s", role, rehearsed)}
	err := Rehearse(ctx, rdb, role)
	if err == nil {
		err = clearRehearsal(ctx, rdb)
	} else {
		_ = clearRehearsal(context.WithoutCancel(ctx), rdb) // keys that the user may not delete stay
	}
	if err != nil {
		f.Level, f.Detail = Failure, err.Error()
		f.Advice = "make sure that Redis accepts writes, and give the user these rights: ACL SETUSER " +
			strings.TrimPrefix(RightsOf(role, names).ACL("NAME"), "user ")
	}
	return f
}

func eviction(info map[string]string, err error) Finding {
	f := Finding{Check: "eviction", Level: OK}
	if err != nil {
		f.Level = Unknown
		f.Detail = err.Error()
		f.Advice = askInfo
		return f
	}
	how := info["maxmemory_policy"]
	f.Detail = fmt.Sprintf("maxmemory %s, maxmemory-policy %s", info["maxmemory_human"], how)
	switch {
	case strings.HasPrefix(how, "allkeys-"):
		f.Level, f.Advice = Failure, "set maxmemory-policy noeviction: the present policy drops buckets when memory is full"
		if info["maxmemory"] == "0" {
			f.Level = Warning
		}
	case strings.HasPrefix(how, "volatile-"):
		f.Level = Warning
		f.Advice = "set maxmemory-policy noeviction: when memory is full, the present policy drops keys that " +
			"expire. It drops buckets of templates, which come back full. It also drops records of request ids, and then " +
			"repeated takes are charged again"
	}
	return f
}

func durability(info map[string]string, err error) Finding {
	f := Finding{Check: "durability", Level: OK}
	if err != nil {
		f.Level = Unknown
		f.Detail = err.Error()
		f.Advice = askInfo
		return f
	}
	_, enough := info["min_slaves_good_slaves"] // exists only if min-replicas-to-write is set
	replicas := info["connected_slaves"]
	f.Detail = fmt.Sprintf("%s replicas, append-only file %s", replicas,
		map[string]string{"1": "on", "0": "off"}[info["aof_enabled"]])
	switch {
	case info["role"] != "" && info["role"] != "master":
		f.Level = Failure
		f.Detail = "this server is a replica, so it accepts no writes"
		f.Advice = "connect to the primary, or use a redis-sentinel:// or redis-cluster:// URL"
	case replicas != "0" && !enough:
		f.Level, f.Advice = Warning,
			"set min-replicas-to-write 1 and min-replicas-max-lag 1: otherwise a fail-over may lose the takes of some seconds"
	case replicas == "0" && info["aof_enabled"] == "0":
		f.Level, f.Advice = Warning,
			"set appendonly yes: otherwise a restart loses all buckets. Buckets of templates come back full, others by on_loss"
	}
	return f
}

// clock compares the server's clock with this machine's. It does this twice, to find a clock that drifts.
func clock(ctx context.Context, rdb redis.UniversalClient) Finding {
	f := Finding{Check: "clock", Level: OK}
	offset := func() (time.Duration, error) {
		sent := time.Now()
		at, err := rdb.Time(ctx).Result()
		return at.Sub(sent.Add(time.Since(sent) / 2)), err
	}
	first, err := offset()
	var second time.Duration
	if err == nil {
		if timing.Sleep(ctx.Done(), 300*time.Millisecond) {
			second, err = offset()
		} else {
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		f.Level = Failure
		f.Detail = err.Error()
		f.Advice = "make sure that Redis replies to TIME"
		return f
	}
	f.Detail = fmt.Sprintf("it differs by %s from this machine's clock", first.Round(time.Millisecond))
	if moved := (second - first).Abs(); moved > drift {
		f.Level, f.Advice = Warning, fmt.Sprintf(
			"the difference changed by %s in 0.3 s: let time daemons slew clocks, not step them", moved.Round(time.Millisecond))
	} else if first.Abs() > skewed {
		f.Level = Warning
		f.Advice = "set the clocks right: calendars follow the clock of Redis, and times in logs mislead. Rates stay right"
	}
	return f
}

// Etcd returns the finding about a request to etcd. answer describes the reply, and err is the request's failure.
// section is the section of the configuration that has the endpoints.
func Etcd(section, answer string, err error) Finding {
	f := Finding{Check: "etcd answers", Level: OK, Detail: answer}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		f.Level = Failure
		f.Detail = "no reply in time"
		f.Advice = "check " + section + ".endpoints and the network"
	case err != nil:
		f.Level = Failure
		f.Detail = err.Error()
		f.Advice = "check " + section + ".endpoints, TLS, user and password"
	}
	return f
}
