-- return: gives n tokens back to the bucket, up to its capacity. Under a strict policy the limit is the capacity less
-- the outstanding tokens.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
--       4 {K}:flows: see division; only if a flow paid for some of the tokens with its right
-- ARGV  1 n: tokens to give back, at least 1
--       2 the era in which they were taken; 0 for any
--       3 the flow; 4 paid: tokens for which the flow paid with its right. It gets the right back for as many of them
--         as go back; only with KEYS 4
-- Reply {1, tokens, clamped}: tokens after the call; clamped is how many had no room, because the bucket is full or K
--         is missing
--       {2}: no such bucket, or one without a policy, whose capacity is unknown; nothing is created
--       {3, k}: KEYS k holds something else
--       {4, tokens}: the bucket is in another era; nothing is returned
--
-- A return does not count as a refill, so the index and the state stay as they are.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/division
--#include shared/named
--#include shared/unwritten
local s = {}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
if not p then return unwritten(KEYS[3], {2}) end
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end
s.lost, tokens = not tokens, tokens or 0
if ARGV[2] ~= '0' and ARGV[2] + 0 ~= s.era then return unwritten(KEYS[3], {4, tokens}) end
local n = ARGV[1] + 0
local clamped = excess(s, p, tokens, n)
if clamped == n then return unwritten(KEYS[3], {1, tokens, clamped}) end
local turn = KEYS[4] and read_flow(KEYS[4], ARGV[3]) -- a plan that can't be read has no rights
tokens = call('INCRBY', KEYS[1], format('%d', n - clamped))
if turn then
  pay_back(turn, min(ARGV[4] + 0, n - clamped))
  write_rights(KEYS[4])
end
return {1, tokens, clamped}
