-- reset: an operator sets the bucket's tokens, drops the credit of the time up to now and forgives its debt.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
-- ARGV  1 tokens that the bucket is to hold, 0 to the capacity; -1 for the capacity. Under a strict policy it gets at
--         most the capacity less what is outstanding
-- Reply {1, tokens, clamped, era, index}: after the call; clamped is how many of the tokens asked for had no room
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--
-- The script adds one to the index, so that a refiller detects a fail-over that loses this write. Scheduled steps up to
-- now count as credited.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/expiry
--#include shared/unwritten
local s = {}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
if not p then return unwritten(KEYS[3], {2}) end
local before = get_integer(KEYS[1])
if before == false then return {3, 1} end
local index = get_integer(KEYS[2])
if index == false then return {3, 2} end
local want = ARGV[1] + 0
if want < 0 then want = room(s, p) end
local tokens, now = min(want, room(s, p)), now_us()
s.index = max(index or 0, s.index) + 1
s.last = max(s.last, now)
s.carry = 0
s.debt = 0
if p.stepped then
  s.step = max(s.step, now)
  if s.next <= now then s.next = 0 end
end
local undone = min(before or 0, 0) -- below 0, plain clients are about to undo their tries
call('SET', KEYS[1], format('%d', tokens + undone), 'KEEPTTL')
call('SET', KEYS[2], format('%d', s.index), 'KEEPTTL')
put(s, p, KEYS[3])
rejoin(KEYS)
return {1, tokens + undone, want - tokens, s.era, s.index}
