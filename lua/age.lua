-- age: give a template's bucket a new expiry if less than half its life is left. Where the active set shares a slot
-- with its buckets, refill does it.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
-- ARGV  none
-- Reply {1, till_s, new}: when the bucket expires; new 1 if that moved. 0, 0 if its policy in force is no template's
--       {2}: no such bucket, or one without a policy
--       {3, 3}: KEYS 3 holds something else
--#include policy
--#include bucket
--#include expiry
local p = open({}, KEYS[3])
if p == false then return {3, 3} end
if not p then return {2} end
if p.kind ~= TEMPLATE then return {1, 0, 0} end
local till, new = arm(KEYS, p, now_us(), 0.5, 0)
return {1, till, new and 1 or 0}
