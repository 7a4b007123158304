-- sweep: ends reservations and leases whose time is over.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, 4 {K}:outstanding, 5 {K}:due, as in reserve
-- ARGV  1 most: how many records to end at most
-- Reply {1, now_us, tokens, returned, clamped, void, dropped, outstanding, due_us, debt}: tokens and the last three are
--             those after the call. Tokens of reservations: returned went back, clamped found the bucket full, void are
--             of another era. dropped were tokens of leases
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/outstanding
--#include shared/unwritten
local refused, s, p, before = read_outstanding('')
if refused then return unwritten(KEYS[3], refused) end
local now = now_us()
if s.due == 0 or s.due > now then
  return unwritten(KEYS[3], {1, now, before, 0, 0, 0, 0, s.out, s.due, s.debt})
end
local tokens, sum = end_due(s, p, before, now, ARGV[1] + 0)
find_due(s)
put_tokens(tokens, before)
put(s, p, KEYS[3])
outlive(now + MEMORY_US, now)
return {1, now, tokens, sum[1], sum[2], sum[3], sum[4], s.out, s.due, s.debt}
