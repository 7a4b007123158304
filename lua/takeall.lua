-- takeall: tokens of several buckets, all or nothing; with a request id charged once for all calls with the same one.
--
-- KEYS  per bucket, each once: K, {K}:ctl
--       then, if there is a request id: {K}:req:<id> of the first bucket: what the request asked for and got: see
--       request
-- ARGV  1 how many buckets
--       2 what is asked for: a name for these tokens of these buckets, without spaces; 3 memory_ms: how long the
--         request is remembered from its charge on, at least 1; both '' without a request id
--       4.. per bucket: n, the tokens to take, at least 1; leave: what is to be left, as in takes
-- Reply {1, fits, left, wait_us, era, index, last_us, now_us, pol, ...}: taken from all that fit; the others are in
--             shadow mode, and nothing is taken from them. If it was an earlier call of the same request, left and era
--             are those of then, and wait_us, index, last_us and now_us are 0; pol: the policy's text now
--       {0, fits, left, wait_us, era, index, last_us, now_us, pol, ...}: nothing was taken; per bucket whether it fits
--             (1 or 0), and how it stands; wait_us is 0 if it fits
--       {2, b}: no such bucket as the b-th, or one without a policy, to which nothing could be returned; nothing is
--       created
--       {3, k}: KEYS k holds something else
--       {5}: the request asked for something else
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
--#include shared/leave
--#include shared/request
--#include shared/unwritten
local n = ARGV[1] + 0
local request = KEYS[2 * n + 1]
local first = request and pcall('GET', request)
if type(first) == 'table' then
  wrong_type(first)
  return {3, 2 * n + 1}
end
if first then
  local asked, got = match(first, ALL)
  if not asked and not match(first, ONCE) then return {3, 2 * n + 1} end
  if asked ~= ARGV[2] then return {5} end
  local reply, b = {1}, 0
  for fits, left, era in string.gmatch(got, ' ([01]) (%-?%d+) (%d+)') do
    local s = {}
    b = b + 1
    for _, v in ipairs({fits + 0, left + 0, 0, era + 0, 0, 0, 0, policy_text(s, open(s, KEYS[2 * b]))}) do
      reply[#reply + 1] = v
    end
  end
  return unwritten(KEYS[2], reply)
end
local buckets, fit = {}, true
for b = 1, n do
  local tokens, s = get_integer(KEYS[2 * b - 1]), {}
  if tokens == false then return {3, 2 * b - 1} end
  local p = open(s, KEYS[2 * b])
  if p == false then return {3, 2 * b} end
  if not p then return unwritten(KEYS[2 * b], {2, b}) end
  local want, keep = ARGV[2 * b + 2] + 0, least(ARGV[2 * b + 3], p.capacity)
  tokens = tokens or 0
  local fits = tokens - keep >= want
  buckets[b] = {tokens = tokens, n = want, keep = keep, fits = fits, s = s, p = p}
  fit = fit and (fits or p.enforcement % 8 >= 4)
end
local reply = {fit and 1 or 0}
local now = now_us()
local got = ''
for b, bucket in ipairs(buckets) do
  local s, values = bucket.s, nil
  if bucket.fits then
    if fit then bucket.tokens = call('DECRBY', KEYS[2 * b - 1], ARGV[2 * b + 2]) end
    values = {1, bucket.tokens, 0, s.era, s.index, s.last, now, policy_text(s, bucket.p)}
  else
    values = {0, denial(KEYS[2 * b], s, bucket.p, now, bucket.tokens, bucket.n, bucket.n, bucket.keep)}
  end
  got = got .. format(' %d %d %d', values[1], values[2], s.era)
  for _, v in ipairs(values) do reply[#reply + 1] = v end
end
if not fit or not request then return unwritten(KEYS[2], reply) end -- all may be in shadow mode
call('SET', request, ARGV[2] .. got, 'PX', ARGV[3])
return reply
