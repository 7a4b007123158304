-- override: gives one key of a template a policy of its own, or removes that policy. If the bucket exists, it is
-- switched to the policy that applies then.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
--       4 {K}:override the policy of this key alone: pol (see policy)
--       5 {K}:lazy  as in lazy
-- ARGV  1 pol: the policy for this key alone, '' to remove the one that it has. The script sets the seq of the policy,
--         to one more than that of the last one
--       2 pol: the template's policy; '' if no template matches the key any more. Then the policy of the key stays in
--         force under version 0, so that any configured policy replaces it
--       3 1 if the template is lazy, 0 otherwise
-- Reply {1, had, kind, left, till_s, pol}
--           had: 1 if the key had a policy of its own, 0 otherwise
--           kind: 0 the bucket is missing (or lazy and full), 1 it is refilled, 2 it is lazy
--           left: its tokens after the switch; a lazy bucket that is missing counts as full before the switch
--           till_s: when a refilled bucket expires, which the caller enters in the sets of the template; otherwise 0
--           pol: the policy that the key has now, or ''
--       {3, k}: KEYS k holds something else
--       {5}: a policy is given, but the bucket is not a template's: it is configured, or a pool's; nothing written
--
-- The bucket is settled under the policy in force, and then switched. That is no refill. The version of a key's own
-- policy is later than the version of any template, so that no refiller replaces it. When the policy is removed, the
-- version falls, so a new era begins.
--#include shared/redis
--#include shared/ahead
--#include shared/policy
--#include shared/bucket
--#include shared/credit
--#include shared/switch
--#include shared/expiry
local OWN = 4503599627370496 -- 2^52, policy.OwnEpoch
local given, template = ARGV[1], policy(ARGV[2])
local own = pcall('GET', KEYS[4])
if type(own) == 'table' then
  wrong_type(own)
  return {3, 4}
end
local before = own and policy(own)
local now, s = now_us(), {}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
if given ~= '' and p and not p.expires then return {5} end
local index, tokens = get_integer(KEYS[2]), get_integer(KEYS[1])
if p and index == false then return {3, 2} end
if p and tokens == false then return {3, 1} end

local q = template -- the policy from now on
if given ~= '' then
  local seq = before and before.version == OWN and before.seq or 0
  if p and p.version == OWN then seq = max(seq, p.seq) end
  q = altered(policy(given), {version = OWN, seq = seq + 1})
elseif not q and p and p.version == OWN then
  q = altered(p, {version = 0, seq = 0})
end

local kind = 0
local left = 0
local till = 0
if q and ARGV[3] == '1' then
  local old = before or template
  local full = old.capacity * old.per
  local lacks = ahead(KEYS[5], now, old.tokens)
  if not lacks then return {3, 5} end
  local units = max(0, full - lacks)
  local due = units % old.per -- of the next token
  local held, carry = carried(old, q, (units - due) / old.per, due)
  store_ahead(KEYS[5], now, q.tokens, max(0, (q.capacity - held) * q.per - carry))
  if held < q.capacity then kind, left = 2, held end
end
if given ~= '' then
  call('SET', KEYS[4], q.text)
else
  call('DEL', KEYS[4])
end

if p and q and not (given == '' and p.version ~= OWN) then
  tokens = switch(s, p, q, tokens or after_loss(p), index, now)
  if given == '' then s.era = next_era(s.era, now) end
  call('SET', KEYS[1], format('%d', tokens), 'KEEPTTL')
  call('SET', KEYS[2], format('%d', s.index), 'KEEPTTL')
  put(s, q, KEYS[3], q.text)
  record_lowered(KEYS[3], p, q, now)
  till = arm(KEYS, q.life_s, now, 1, 0)
  kind = 1
  left = tokens
end
return {1, own and 1 or 0, kind, left, till, given ~= '' and q.text or ''}
