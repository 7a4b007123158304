-- grant: an operator adds n tokens to the bucket, up to its capacity. Under a strict policy the limit is the capacity
-- less the outstanding tokens.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
-- ARGV  1 n: tokens to add, at least 1
-- Reply {1, tokens, clamped, era, index}: after the call; index is the copy in the state
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--
-- The script adds one to the index, so that a refiller detects a fail-over that loses this write. It does not settle
-- credit: tokens that were due before stay due.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/expiry
--#include shared/unwritten
local s = {}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
if not p then return unwritten(KEYS[3], {2}) end
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end
local index = get_integer(KEYS[2])
if index == false then return {3, 2} end
local held = tokens or min(after_loss(p), room(s, p))
local n = ARGV[1] + 0
local clamped = excess(s, p, held, n)
tokens = call('INCRBY', KEYS[1], format('%d', held + n - clamped - (tokens or 0)))
-- The copy rises by as much as the index. So if another client has moved the index, that stays visible.
s.index = s.index + 1
call('INCRBY', KEYS[2], (index or 0) == 0 and format('%d', s.index) or 1)
put(s, p, KEYS[3])
rejoin(KEYS)
return {1, tokens, clamped, s.era, s.index}
