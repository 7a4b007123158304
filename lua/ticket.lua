-- ticket: where a pool's bucket stands, for the report on which the next grant is founded. Writes nothing.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
-- ARGV  none
-- Reply {1, now_us, era, index, tokens, added, denied, pol}: added and denied are texts: tokens added by refills and
--           denied by takes since the bucket began to count them; index is the copy in the state; pol is the policy in
--           force, '' and era 0 if the bucket has no state
--       {3, k}: KEYS k holds something else
--#include policy
--#include bucket
local s, now = {}, now_us()
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
if not p then return {1, now, 0, 0, tokens or 0, '0', '0', ''} end
local counts = call('HMGET', KEYS[3], 'added', 'denied')
return {1, now, s.era, s.index, tokens or 0, counts[1] or '0', counts[2] or '0', p.text}
