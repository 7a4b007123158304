-- takeall: tokens of several buckets, all or nothing.
--
-- KEYS  per bucket, each once: K, {K}, {K}:ctl, as in take
-- ARGV  per bucket: n, the tokens to take, at least 1
-- Reply {1, left, era, pol, ...}: taken; per bucket the tokens left, the era they were taken in, the policy's text as in take
--       {0, fits, left, wait_us, era, index, last_us, now_us, pol, ...}: nothing was taken; per bucket whether its n tokens are there (1
--             or 0), and otherwise as take's denial; wait_us is 0 if they are
--       {2, b}: no such bucket as the b-th, or one without a policy, to which nothing could be returned; nothing is created or taken
--       {3, k}: KEYS k holds something else; nothing is taken
--#include state
local buckets, fit = {}, true
for b = 1, #ARGV do
  local k = 3 * b
  local tokens = get(KEYS[k - 2])
  if tokens == false then return {3, k - 2} end
  local index = get(KEYS[k - 1])
  if index == false then return {3, k - 1} end
  local s, p, pol = read_ctl(KEYS[k])
  if s == false then return {3, k} end
  if not s then return {2, b} end
  local n = tonumber(ARGV[b])
  tokens = tokens or 0
  buckets[b] = {tokens = tokens, n = n, fits = tokens >= n, s = s, p = p, pol = pol, index = index or s.index}
  fit = fit and tokens >= n
end
local reply = {fit and 1 or 0}
local now = now_us()
for b, at in ipairs(buckets) do
  local key = KEYS[3 * b - 2]
  local values
  if fit then
    values = {redis.call('DECRBY', key, ARGV[b]), at.s.era, told(at.s, at.p, at.pol)}
  else
    if not at.fits then count_denied(KEYS[3 * b], at.p, ARGV[b]) end
    values = {at.fits and 1 or 0, at.tokens, wait_us(at.s, at.p, at.tokens, at.n, now), at.s.era, at.index, at.s.last, now, told(at.s, at.p, at.pol)}
  end
  for _, v in ipairs(values) do reply[#reply + 1] = v end
end
return reply
