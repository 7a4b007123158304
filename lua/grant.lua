-- grant: an operator adds n tokens to the bucket, up to its capacity; under a strict policy up to what is outstanding leaves of it.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  1 n: tokens to add, at least 1
-- Reply {1, tokens, clamped, era, index}: after the call
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--
-- The index is kept and one added, so that a fail-over which loses the write is noticed. Credit is not settled: what was due stays due.
--#include state
local s, p = read_ctl(KEYS[3])
if s == false then return {3, 3} end
if not s then return {2} end
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
tokens = tokens or 0
local n = tonumber(ARGV[1])
local clamped = math.min(n, math.max(0, tokens + n - room(s, p)))
tokens = redis.call('INCRBY', KEYS[1], string.format('%.0f', n - clamped))
-- The copy moves by as much as the index: a foreign client's move stays visible.
local behind = (index or s.index) - s.index
index = redis.call('INCRBY', KEYS[2], index and 1 or string.format('%.0f', s.index + 1))
s.index = index - behind
redis.call('HSET', KEYS[3], 'st', format_state(s))
return {1, tokens, clamped, s.era, index}
