-- limit: gives one key of a template a policy of its own, or takes it away, and switches the bucket to it if there is one.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
--       4 {K}:limit  the policy of this key alone: text as in state.lua
--       5 {K}:lazy   as in lazy
-- ARGV  1 pol: the policy for this key alone, whose seq is chosen here: one more than that of the last one; '' to take it away
--       2 pol: the template's policy; '' if no template matches the key any more: then only KEYS 4 is deleted
--       3 1 if the template is lazy, 0 otherwise
-- Reply {1, had, kind, left, enter, was_s, till_s, pol}: had: whether the key had a policy of its own; pol: the one that it has then, or ''
--           kind, left: what the bucket is, 0 missing (or lazy and full), 1 refilled, 2 lazy; and its tokens after the switch; a
--           lazy one counts as full before, if it is missing
--           enter 1: the caller is to enter the bucket in the active set; was_s, till_s: the caller is to count that its expiry
--           moved, as in taketemplate; 0 0 if kind isn't 1
--       {3, k}: KEYS k holds something else
--
-- The bucket is settled under the policy in force, then switched: nothing is refilled. The fence of a key's own policy is later
-- than that of any template, so that no refiller replaces it; since the fence falls when it is taken away, that begins a new era.
--#include ahead
--#include state
--#include expiry
local given, template = ARGV[1], policy(ARGV[2])
local own = redis.pcall('GET', KEYS[4])
if type(own) == 'table' then
  wrong_type(own)
  return {3, 4}
end
local before = policy(own or nil)
local now = now_us()
local s, p = read_ctl(KEYS[3])
if s == false then return {3, 3} end
local index, tokens = get(KEYS[2]), get(KEYS[1])
if s and index == false then return {3, 2} end
if s and tokens == false then return {3, 1} end

-- The policy from now on.
local q, pol, OWN = template, ARGV[2], 4503599627370496 -- 2^52, policy.OwnEpoch
if given ~= '' then
  local seq = before and before.epoch == OWN and before.seq or 0
  if p and p.epoch == OWN then seq = math.max(seq, p.seq) end
  pol = string.gsub(given, '^%d+ %d+ ', string.format('%.0f %.0f ', OWN, seq + 1))
  q = policy(pol)
end

-- carried is how many of the tokens held under policy p stay.
local function carried(p, q, tokens)
  if q.carry_over == 2 then return 0 end
  if q.carry_over == 1 and q.capacity < p.capacity then return math.floor(tokens / p.capacity * q.capacity) end
  return math.min(tokens, q.capacity)
end

local kind, left, enter, was, till = 0, 0, 0, 0, 0
if q and ARGV[3] == '1' then
  local old = before or template
  local full = old.capacity * old.per
  local lacks = ahead(KEYS[5], now, old.tokens, full)
  if not lacks then return {3, 5} end
  local held = carried(old, q, math.floor((full - lacks) / old.per))
  store_ahead(KEYS[5], now, q.tokens, (q.capacity - held) * q.per)
  if held < q.capacity then kind, left = 2, held end
end
if given ~= '' then
  redis.call('SET', KEYS[4], pol)
else
  redis.call('DEL', KEYS[4])
end

if s and q and not (given == '' and p.epoch ~= OWN) then
  local carry, debt = 0, s.debt
  local current = index or s.index
  tokens = tokens or (p.on_loss == 1 and p.capacity or 0)
  if current == s.index and now >= s.last then
    local units = math.min(now - s.last, p.max_elapsed) * p.tokens + s.carry
    carry = units % p.per
    local add = (units - carry) / p.per
    local paid = math.min(add, s.debt)
    s.debt, add = s.debt - paid, add - paid
    tokens = tokens + add
    if tokens >= room(s, p) then tokens, carry = room(s, p), 0 end
  end
  tokens = math.min(carried(p, q, tokens), room(s, q))
  if q.carry_over == 2 then carry = 0 end
  if q.per ~= p.per then carry = math.max(0, math.floor(carry / p.per * q.per) - 1) end
  if given == '' then s.era = math.max(math.floor(now / 1000000), s.era + 1) end
  s.index, s.carry, s.last = math.max(current, s.index) + 1, carry, math.max(now, s.last)
  redis.call('SET', KEYS[1], string.format('%.0f', tokens), 'KEEPTTL')
  redis.call('SET', KEYS[2], string.format('%.0f', s.index), 'KEEPTTL')
  redis.call('HSET', KEYS[3], 'st', format_state(s), 'pol', pol)
  if s.debt ~= debt then put_out(KEYS[3], s) end
  was, till = arm(KEYS, q, now, ttl_s(q))
  kind, left = 1, tokens
  if tokens < q.capacity then enter = 1 end
end
return {1, own and 1 or 0, kind, left, enter, was, till, given ~= '' and pol or ''}
