-- peek: reads what the bucket holds and when n tokens are due. It writes nothing.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
-- ARGV  1 n: the tokens for which wait_us is returned, at least 1
-- Reply {1, tokens, wait_us, era, index, last_us, now_us, pol, carry, step_us, next_us, outstanding, due_us, debt,
--           lost, moved}: wait_us as in denial; index is the copy in the state; lost is 1 if K is missing; moved is how
--           far {K} is ahead of the copy, 0 if {K} is missing or 0. If the bucket has no state, pol is '' and the
--           numbers of the state are 0
--       {2}: no such bucket
--       {3, k}: KEYS k holds something else
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
local s = {carry = 0, step = 0, next = 0, out = 0, due = 0, debt = 0}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end
local index = get_integer(KEYS[2])
if index == false then return {3, 2} end
if not tokens and not index and not p then return {2} end
local lost = not tokens and 1 or 0
tokens = tokens or 0
local moved = (index or 0) == 0 and 0 or index - (s.index or 0)
local n, now = ARGV[1] + 0, now_us()
return {1, tokens, wait_us(s, p, tokens, n, now), s.era or 0, s.index or 0, s.last or 0, now, p and p.text or '',
  s.carry, s.step, s.next, s.out, s.due, s.debt, lost, moved}
