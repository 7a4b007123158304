-- reserve: takes n tokens, all or nothing, and holds them under an id until they are settled or their time ends.
--
-- KEYS  1 K        tokens
--       2 {K}      index
--       3 {K}:ctl  state
--       4 {K}:outstanding records
--       5 {K}:due  the ends of the records
--       6 {K}:flows, 7 {K}:use: see division; only if the reservation is for a flow
-- ARGV  1 id
--       2 n: tokens to reserve, at least 1
--       3 ttl_us: how long they are held, at least 1
--       4 overrun: what happens to tokens that are used beyond the reservation and that the bucket can't pay:
--         0 they are forgiven, 1 they are owed
--       5 leave: tokens that must be left, as in takes
--       6 the flow; only with KEYS 6 and 7
-- Reply {1, left, until_us, now_us, era, pol}: reserved until until_us
--       {0, left, wait_us, era, index, last_us, now_us, pol}: denied, as in takeonce
--       {2}: no such bucket, or one without a policy; nothing is created
--       {3, k}: KEYS k holds something else
--       {5}: the id is in use for something else, or for a reservation whose time is over
--
-- If the call is sent again with the same id and n, it gets the same reply and takes nothing.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
--#include shared/leave
--#include shared/outstanding
--#include shared/division
--#include shared/turn
--#include shared/named
--#include shared/unwritten
local refused, s, p, before, r = read_outstanding(ARGV[1])
if refused then return unwritten(KEYS[3], refused) end
local now, n = now_us(), ARGV[2] + 0
if r then
  if r.kind ~= RESERVATION or r.n ~= n or r.ends <= now or r.era ~= s.era then
    return unwritten(KEYS[3], {5})
  end
  return unwritten(KEYS[3], {1, before, r.ends, now, s.era, policy_text(s, p)})
end
local turn = KEYS[6] and read_flow(KEYS[6], ARGV[6])
if turn == false then return {3, 6} end
local swept = s.due > 0 and s.due <= now
local tokens = end_due(s, p, before, now, SWEPT)
local keep = least(ARGV[5], p.capacity)
local fits = tokens - keep >= n
local paid
if turn then
  local made
  made, paid = served(KEYS[7], turn, n, 1, keep, tokens)
  fits = made == n
end
if not fits then
  if swept then
    find_due(s)
    put_tokens(tokens, before)
    put(s, p, KEYS[3])
  end
  local reply = {0, denial(KEYS[3], s, p, now, tokens, n, n, keep)}
  if turn then
    count_refused(KEYS[7], turn, n)
    reply[3] = turn_us(turn, s, p, tokens, now)
  end
  return unwritten(KEYS[3], reply)
end
local ends = now + ARGV[3]
put_tokens(tokens - n, before)
local text = decimals(RESERVATION, n, ends, s.era, ARGV[4])
if turn then
  write_rights(KEYS[6])
  text = text .. ' ' .. decimals(paid) .. ' /' .. ARGV[6]
end
put_text(ARGV[1], ends, text)
s.out = s.out + n
if swept then
  find_due(s)
elseif s.due == 0 or ends < s.due then
  s.due = ends
end
put(s, p, KEYS[3])
outlive(ends, now)
return {1, tokens - n, ends, now, s.era, policy_text(s, p)}
