-- ticket: reads the state of pools' buckets, for the region's report. It writes nothing.
--
-- KEYS  K of each of n buckets, then {K}:ctl of each
-- ARGV  none
-- Reply now_us, then of each bucket one of
--         {1, era, index, tokens, added, denied, pol}: index is the copy in the state. added and denied are texts. They
--             count the tokens that refills added and that takes were denied since the bucket became a pool's. pol is
--             the policy in force. If the bucket has no state, pol is '' and era is 0
--         {3, k}: key k of K and {K}:ctl holds something else
--#include shared/redis
--#include shared/policy
--#include shared/bucket
local function ticket(key, key_ctl)
  local s = {}
  local p = open(s, key_ctl)
  if p == false then return {3, 2} end
  local tokens = get_integer(key)
  if tokens == false then return {3, 1} end
  if not p then return {1, 0, 0, tokens or 0, '0', '0', ''} end
  local counts = call('HMGET', key_ctl, 'added', 'denied')
  return {1, s.era, s.index, tokens or 0, counts[1] or '0', counts[2] or '0', p.text}
end

local n, reply = #KEYS / 2, {now_us()}
for i = 1, n do reply[i + 1] = ticket(KEYS[i], KEYS[n + i]) end
return reply
