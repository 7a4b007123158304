-- settle: ends a reservation with the number of tokens that were used. If fewer were used than reserved, the rest goes
-- back. If more were used, the difference is charged.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, 4 {K}:outstanding, 5 {K}:due, as in reserve
--       6 {K}:flows, 7 {K}:use: see division; only if the reservation may be a flow's
-- ARGV  1 id
--       2 used: tokens, 0 or more
--       3 plainly: 1 to settle a flow's reservation even without KEYS 6 and 7, with no effect on the flow's right
-- Reply {1, now_us, tokens, again, returned, clamped, void, charged, owed, forgiven}: tokens are those after the call.
--             Tokens that were not used: returned went back, clamped found the bucket full, void are of another era.
--             Tokens used beyond the reservation: charged were taken from the bucket, owed are debt, forgiven are not
--             paid. again is 1 if it was settled before; then this is the answer of that time
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--       {5}: the id is in use for something else
--       {7}: the reservation is a flow's, and KEYS 6 and 7 are missing
--       {6}: the id is unknown: its reservation was settled or ran out a while ago, or never existed
--
-- If the time of the reservation is over, its tokens have gone back, except void ones. So all tokens that were used
-- count as used beyond the reservation. Debt is at most the capacity. For tokens that go back, a flow gets back the
-- right with which it paid. Tokens that are charged or owed are counted as demand of the flow, and the flow pays for
-- them.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/outstanding
--#include shared/division
--#include shared/named
--#include shared/unwritten
local refused, s, p, before, r = read_outstanding(ARGV[1])
if refused then return unwritten(KEYS[3], refused) end
if not r then return unwritten(KEYS[3], {6}) end
if r.kind == LEASE then return unwritten(KEYS[3], {5}) end
local now = now_us()
local used = ARGV[2] + 0
local n = r.kind == RUN_OUT and r.void or r.n
if r.kind == SETTLED then return unwritten(KEYS[3], {1, now, before, 1, unpack(r.settlement)}) end
if r.flow and not KEYS[6] and ARGV[3] ~= '1' then return unwritten(KEYS[3], {7}) end
local turn = r.flow and KEYS[6] and read_flow(KEYS[6], r.flow) -- a plan that can't be read has no rights
s.out = max(0, s.out - r.n)
local tokens, returned, clamped, void = give_back(s, p, before, max(0, n - used), r.era)
local over = max(0, used - n)
local charged = min(over, max(0, tokens))
local owed = 0
if r.overrun == 1 then owed = min(over - charged, max(0, p.capacity - s.debt)) end
tokens = tokens - charged
s.debt = s.debt + owed
if turn then
  local free = n - r.paid -- goes back first
  if returned > free then pay_back(turn, returned - free) end
  if charged + owed > 0 then
    ask(KEYS[7], turn.flow, turn.narrow, turn.wide, decimals(charged + owed))
    charge(turn, charged + owed)
  end
  write_rights(KEYS[6])
end
local answer = {returned, clamped, void, charged, owed, over - charged - owed}
put_record(ARGV[1], SETTLED, 0, now + MEMORY_US, r.era, unpack(answer))
tokens = end_due(s, p, tokens, now, SWEPT)
find_due(s)
put_tokens(tokens, before)
put(s, p, KEYS[3])
outlive(now + MEMORY_US, now)
return {1, now, tokens, 0, unpack(answer)}
