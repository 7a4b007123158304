-- take: n tokens, all or nothing.
--
-- KEYS  1 K        tokens
--       2 {K}      index
--       3 {K}:ctl  state
-- ARGV  1 n: tokens to take, at least 1
--       2 1 to be told the policy as well, 0 otherwise
-- Reply an integer: taken; the tokens left (ARGV 2 is 0)
--       {1, left, pol}: taken, with the policy's text ('' if the bucket has none; grant_era is 0 unless a grant is in force)
--       {0, left, wait_us, era, index, last_us, now_us, pol}: denied; wait_us until n tokens are due, -1 if never or unknown
--       {2}: no such bucket; nothing is created
--       {3, k}: KEYS k holds something else
--
-- A take that fits costs one command. One that doesn't is undone before the script ends, so K is never seen below zero.
local left = redis.pcall('DECRBY', KEYS[1], ARGV[1])
if type(left) == 'table' then
  if string.find(left.err, 'WRONGTYPE', 1, true) or string.find(left.err, 'not an integer', 1, true) then return {3, 1} end
  return left
end
if left >= 0 and ARGV[2] == '0' then return left end
--#include text
if left >= 0 then
  local pol = policy_text(KEYS[3])
  if type(pol) == 'string' then return {1, left, pol} end
  redis.call('INCRBY', KEYS[1], ARGV[1])
  return pol or {3, 3}
end
--#include state
local n = tonumber(ARGV[1])
left = redis.call('INCRBY', KEYS[1], ARGV[1])
local s, p, pol = read_ctl(KEYS[3])
local index = get(KEYS[2])
-- An empty key without index and state is what DECRBY made of a missing one.
local unknown = left == 0 and not s and not index
if unknown then redis.call('DEL', KEYS[1]) end
if s == false then return {3, 3} end
if index == false then return {3, 2} end
if unknown then return {2} end
local now = now_us()
if not s then return {0, left, -1, 0, index or 0, 0, now, ''} end
count_denied(KEYS[3], p, ARGV[1])
return {0, left, wait_us(s, p, left, n, now), s.era, index or s.index, s.last, now, told(s, p, pol)}
