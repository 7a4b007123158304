-- reset: an operator sets the bucket's tokens, drops the credit of the time up to now and forgives its debt.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  1 tokens to hold, 0 to capacity; -1 for the capacity; under a strict policy no more than what is outstanding leaves of it
-- Reply {1, tokens, clamped, era, index}: after the call; clamped is what was asked for above that
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--
-- The index is kept and one added, so that a fail-over which loses the write is noticed. Scheduled steps up to now count as credited.
--#include state
local s, p = read_ctl(KEYS[3])
if s == false then return {3, 3} end
if not s then return {2} end
local held = get(KEYS[1])
if held == false then return {3, 1} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
local want = tonumber(ARGV[1])
if want < 0 then want = room(s, p) end
local tokens = math.min(want, room(s, p))
local now = now_us()
s.index = math.max(index or 0, s.index) + 1
s.last, s.carry = math.max(s.last, now), 0
if p.stepped then
  s.step = now
  if s.next <= now then s.next = 0 end
end
redis.call('SET', KEYS[1], string.format('%.0f', tokens), 'KEEPTTL')
redis.call('SET', KEYS[2], string.format('%.0f', s.index), 'KEEPTTL')
redis.call('HSET', KEYS[3], 'st', format_state(s))
if s.debt > 0 then
  s.debt = 0
  put_out(KEYS[3], s)
end
return {1, tokens, want - tokens, s.era, s.index}
