-- takeonce: n tokens, all or nothing, charged once for all calls with the same request id.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
--       4 {K}:req:<id>  what the request took: n and the tokens left then, with a space between
-- ARGV  1 n: tokens to take, at least 1
--       2 memory_ms: how long the request is remembered from its first charge on, at least 1
-- Reply {1, left, pol}, pol as in take: taken by this call, or by an earlier one of the same request: left is what was left then
--       {0, left, wait_us, era, index, last_us, now_us, pol}: denied, as in take; a denial is not remembered
--       {2}: no such bucket; nothing is created
--       {3, k}: KEYS k holds something else
--       {5, n}: the request took another number of tokens, n
--#include state
local first = redis.pcall('GET', KEYS[4])
if type(first) == 'table' then
  wrong_type(first)
  return {3, 4}
end
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
local s, p, pol = read_ctl(KEYS[3])
if s == false then return {3, 3} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
if first then
  local n, left = string.match(first, '^(%d+) (%d+)$')
  if not n then return {3, 4} end
  if n ~= ARGV[1] then return {5, tonumber(n)} end
  return {1, tonumber(left), told(s, p, pol)}
end
if not tokens and not s and not index then return {2} end
tokens = tokens or 0
local n = tonumber(ARGV[1])
if tokens < n then
  local now = now_us()
  if not s then return {0, tokens, -1, 0, index or 0, 0, now, ''} end
  count_denied(KEYS[3], p, ARGV[1])
  return {0, tokens, wait_us(s, p, tokens, n, now), s.era, index or s.index, s.last, now, told(s, p, pol)}
end
local left = redis.call('DECRBY', KEYS[1], ARGV[1])
redis.call('SET', KEYS[4], ARGV[1] .. ' ' .. string.format('%.0f', left), 'PX', ARGV[2])
return {1, left, told(s, p, pol)}
