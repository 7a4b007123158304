-- upto: as many tokens as there are, up to n.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  1 n: most tokens to take, at least 1
-- Reply {1, left, taken, pol}: taken is 1 to n; pol as in take
--       {0, left, wait_us, era, index, last_us, now_us, pol}: the bucket is empty; wait_us until one token is due
--       {2}: no such bucket; nothing is created
--       {3, k}: KEYS k holds something else
--#include state
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
local s, p, pol = read_ctl(KEYS[3])
if s == false then return {3, 3} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
if not tokens and not s and not index then return {2} end
tokens = tokens or 0
local taken = math.min(tokens, tonumber(ARGV[1]))
if taken > 0 then
  return {1, redis.call('DECRBY', KEYS[1], string.format('%.0f', taken)), taken, told(s, p, pol)}
end
local now = now_us()
if not s then return {0, tokens, -1, 0, index or 0, 0, now, ''} end
count_denied(KEYS[3], p, ARGV[1])
return {0, tokens, wait_us(s, p, tokens, 1, now), s.era, index or s.index, s.last, now, told(s, p, pol)}
