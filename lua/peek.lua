-- peek: what the bucket holds and when more falls due. Writes nothing.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  1 n: the tokens to tell the wait for, at least 1
-- Reply {1, tokens, wait_us, era, index, last_us, now_us, pol, carry, step_us, next_us, outstanding, due_us, debt}; wait_us as in take, pol is '' and the
--       numbers of the state are 0 if the bucket has no state
--       {2}: no such bucket
--       {3, k}: KEYS k holds something else
--#include state
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
local s, p, pol = read_ctl(KEYS[3])
if s == false then return {3, 3} end
if not tokens and not index and not s then return {2} end
local now = now_us()
tokens = tokens or 0
if not s then
  local wait = -1
  if tokens >= tonumber(ARGV[1]) then wait = 0 end
  return {1, tokens, wait, 0, index or 0, 0, now, '', 0, 0, 0, 0, 0, 0}
end
return {1, tokens, wait_us(s, p, tokens, tonumber(ARGV[1]), now), s.era, index or s.index, s.last, now, pol, s.carry, s.step, s.next,
  s.out, s.due, s.debt}
