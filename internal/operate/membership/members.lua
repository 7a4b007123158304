-- Writes a replica into the list of replicas and reads the other entries.
--
-- KEYS[1]  the list: a sorted set of the replicas' descriptions of themselves,
--          scored by their time (ms, this server's clock)
-- ARGV[1]  this replica's previous description, or ''
-- ARGV[2]  its new description, or '' if it leaves
-- ARGV[3]  after how long a silent replica is dropped, ms
-- ARGV[4]  the most replicas; further ones are not written
--
-- Reply: now (ms), then for each replica its description and the time of that (ms).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ARGV[3]))
-- Entries of a later time were made while the clock was ahead.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now + ARGV[3]), '+inf')
if ARGV[2] ~= '' and redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[4]) then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local reply = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
table.insert(reply, 1, string.format('%.0f', now))
return reply
