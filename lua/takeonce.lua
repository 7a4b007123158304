-- takeonce: takes n tokens, all or nothing, or as many as there are. All calls with the same request id are charged
-- once.
--
-- KEYS  1 K, 2 {K}:ctl
--       3 {K}:req:<id>  has what the request asked for and got: see request
--       4 {K}:flows, 5 {K}:use: see division; only if the bucket may be divided
-- ARGV  1 n, 2 count, 3 leave: a run of takes, as in takes, whose count is 1 unless n is 0
--       4 memory_ms: how long the request is remembered from its first charge on, at least 1
--       5 the flow, whether the bucket is divided or not
-- Reply {1, left, taken, era, again, pol, paid}: taken by this call, or, if again is 1, by an earlier call of the same
--           request. left, era and paid are those of the call that took the tokens. pol is the policy's text now, '' if
--           the bucket has none. paid is the number of tokens for which the flow paid with its right
--       {0, left, wait_us, era, index, last_us, now_us, pol}: denied, as in denial; a denial is not remembered
--       {2}: no such bucket; nothing is created
--       {3, k}: KEYS k holds something else
--       {5}: the request asked for something else
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
--#include shared/leave
--#include shared/division
--#include shared/turn
--#include shared/named
--#include shared/request
--#include shared/unwritten
local first = pcall('GET', KEYS[3])
if type(first) == 'table' then
  wrong_type(first)
  return {3, 3}
end
local s = {}
local p = open(s, KEYS[2])
local asked = table.concat(ARGV, ' ', 1, 3)
if first then
  local same, taken, left, era, paid, flow = match(first, ONCE)
  if not same and not match(first, ALL) then return {3, 3} end
  if same ~= asked or flow ~= ARGV[5] then return {5} end
  return unwritten(KEYS[2], {1, left + 0, taken + 0, era + 0, 1, policy_text(s, p), paid + 0})
end
if p == false then return {3, 2} end
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end
if not tokens and not p then return unwritten(KEYS[2], {2}) end
tokens = tokens or 0
local up_to, keep = ARGV[1] == '0', least(ARGV[3], p and p.capacity or 0)
local n = (up_to and ARGV[2] or ARGV[1]) + 0
local take, paid = up_to and min(n, tokens - keep) or n, 0
if tokens - keep < take then take = 0 end
local turn = KEYS[4] and read_flow(KEYS[4], ARGV[5])
if turn == false then return {3, 4} end
if turn then
  take, paid = served(KEYS[5], turn, ARGV[1] + 0, ARGV[2] + 0, keep, tokens)
  count_refused(KEYS[5], turn, n - take)
end
if take < 1 then
  local now = now_us()
  local reply = {0, denial(KEYS[2], s, p, now, tokens, n, up_to and 1 or n, keep)}
  if turn and p then reply[3] = turn_us(turn, s, p, tokens, now) end
  return unwritten(KEYS[2], reply)
end
local left, era = call('DECRBY', KEYS[1], format('%d', take)), p and s.era or 0
if turn then write_rights(KEYS[4]) end
local got = format(' %d %d %d %d /', take, left, era, paid) .. ARGV[5]
call('SET', KEYS[3], asked .. got, 'PX', ARGV[4])
return {1, left, take, era, 0, policy_text(s, p), paid}
