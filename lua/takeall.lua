-- takeall: takes tokens from several buckets, all or nothing. All calls with the same request id are charged once.
--
-- KEYS  per bucket, each once: K, {K}:ctl; and, only if it may be divided, {K}:flows, {K}:use: see division
--       then, if there is a request id: {K}:req:<id> of the first bucket, which has what the request asked for and got:
--       see request
-- ARGV  1 how many buckets
--       2 a hash of the demands, without spaces; 3 memory_ms: how long the request is remembered after it was charged,
--         at least 1; both '' without a request id
--       4.. per bucket: n, the tokens to take, at least 1; leave: tokens that must be left, as in takes; divided: 1 if
--         the bucket may be divided; flow: the flow for which the tokens are
-- Reply {1, fits, left, wait_us, era, index, last_us, now_us, pol, paid, ...}: taken from all buckets whose fits is 1.
--             The others are in shadow mode, and nothing was taken from them. pol is the policy's text now. paid is the
--             number of tokens for which the flow paid with its right. If an earlier call of the same request took the
--             tokens, left, era and paid are those of that call, and wait_us, index, last_us and now_us are 0
--       {0, fits, left, wait_us, era, index, last_us, now_us, pol, paid, ...}: nothing was taken; per bucket whether
--             the take fits (1 or 0), and the bucket's state; wait_us is 0 if it fits
--       {2, b}: bucket b doesn't exist, or has no policy, so that nothing could be returned to it; nothing is created
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
local n = ARGV[1] + 0
local buckets = {}
local keys = 0
for b = 1, n do
  local at = 4 * b
  local bucket = {key = keys + 1, ctl = keys + 2, n = ARGV[at] + 0, leave = ARGV[at + 1]}
  keys = keys + 2
  if ARGV[at + 2] == '1' then
    bucket.flows = keys + 1
    bucket.use = KEYS[keys + 2]
    bucket.flow = ARGV[at + 3]
    keys = keys + 2
  end
  buckets[b] = bucket
end
local request = KEYS[keys + 1]
local first = request and pcall('GET', request)
if type(first) == 'table' then
  wrong_type(first)
  return {3, keys + 1}
end

-- again returns the reply to a request that was charged before. got is the text of what the request got then.
local function again(got)
  local reply, b = {1}, 0
  for fits, left, era, paid in string.gmatch(got, ' ([01]) (%-?%d+) (%d+) (%d+)') do
    local s = {}
    b = b + 1
    local at = buckets[b]
    local pol = policy_text(s, open(s, KEYS[at.ctl]))
    for _, v in ipairs({fits + 0, left + 0, 0, era + 0, 0, 0, 0, pol, paid + 0}) do reply[#reply + 1] = v end
  end
  return reply
end

if first then
  local asked, got = match(first, ALL)
  if not asked and not match(first, ONCE) then return {3, keys + 1} end
  if asked ~= ARGV[2] then return {5} end
  return unwritten(KEYS[2], again(got))
end
local now = now_us()

-- try_flow finds out whether a bucket has tokens for its flow. It returns false if the plan can't be read.
local function try_flow(at)
  local turn = read_flow(KEYS[at.flows], at.flow)
  if not turn then return turn ~= false end
  local made
  made, at.paid = served(at.use, turn, at.n, 1, at.keep, at.tokens)
  at.fits = made == at.n
  at.turn = turn
  at.rights = changed_rights()
  if not at.fits then at.wait = turn_us(turn, at.s, at.p, at.tokens, now) end
  return true
end

local fit = true
for b, at in ipairs(buckets) do
  local s = {}
  local tokens = get_integer(KEYS[at.key])
  if tokens == false then return {3, at.key} end
  local p = open(s, KEYS[at.ctl])
  if p == false then return {3, at.ctl} end
  if not p then return unwritten(KEYS[at.ctl], {2, b}) end
  at.s = s
  at.p = p
  at.tokens = tokens or 0
  at.keep = least(at.leave, p.capacity)
  at.fits = at.tokens - at.keep >= at.n
  if at.flows and not try_flow(at) then return {3, at.flows} end
  fit = fit and (at.fits or p.enforcement % 8 >= 4)
end
local reply = {fit and 1 or 0}
local got = ''
for _, at in ipairs(buckets) do
  local s, values = at.s, nil
  if at.fits then
    if fit then at.tokens = call('DECRBY', KEYS[at.key], format('%d', at.n)) end
    values = {1, at.tokens, 0, s.era, s.index, s.last, now, policy_text(s, at.p)}
  else
    values = {0, denial(KEYS[at.ctl], s, at.p, now, at.tokens, at.n, at.n, at.keep)}
    values[3] = at.wait or values[3]
  end
  if fit and at.fits and at.rights then call('HSET', KEYS[at.flows], unpack(at.rights)) end
  if at.turn and not (fit and at.fits) then count_refused(at.use, at.turn, at.n) end
  values[9] = at.fits and at.paid or 0
  got = got .. format(' %d %d %d %d', values[1], values[2], s.era, values[9])
  for _, v in ipairs(values) do reply[#reply + 1] = v end
end
if not fit or not request then return unwritten(KEYS[2], reply) end -- nothing may be written even if all fit
call('SET', request, ARGV[2] .. got, 'PX', ARGV[3])
return reply
