package doctor

import "strings"

// Commands are those that a refiller, its consumers and limiters send, and those
// that their scripts call: with exactly these, everything works on a single server
// or under Sentinel.
func Commands() []string {
	return []string{
		"ping", "evalsha", "eval", "script|load", "time", "get", "mget", "set", "del", "incr", "decr", "incrby",
		"decrby", "hget", "hgetall", "hmget", "hset", "hdel", "hincrby", "zadd", "zcard", "zrange", "zrangebyscore", "zrem",
		"zremrangebyscore", "pexpire", "pttl", "pexpiretime", "pexpireat", "persist", "sadd", "srem", "sscan", "scard",
		"exists", "unlink", "scan", "zscore", "zcount", "zrevrange", "zrevrangebyscore",
	}
}

// ClusterCommands are those that a Cluster needs beside them.
func ClusterCommands() []string { return []string{"cluster|shards", "cluster|slots"} }

// ACL is a user with these rights, as Redis' ACL SETUSER and users.acl take it,
// without a password.
func ACL(user string, cluster bool) string {
	commands := Commands()
	if cluster {
		commands = append(commands, ClusterCommands()...)
	}
	return "user " + user + " on resetchannels ~* -@all +" + strings.Join(commands, " +")
}
