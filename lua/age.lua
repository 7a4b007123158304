-- age: give a template's bucket a new expiry if less than half its life is left.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  none
-- Reply {1, was_s, till_s}: the expiry moved from one instant to the other, 0 for none, or is the same
--       {2}: no such bucket, or one without a policy
--       {3, 3}: KEYS 3 holds something else
--#include state
--#include expiry
local s, p = read_ctl(KEYS[3])
if s == false then return {3, 3} end
if not s then return {2} end
local was, till = arm(KEYS, p, now_us(), ttl_s(p) / 2)
return {1, was, till}
