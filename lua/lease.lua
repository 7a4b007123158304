-- lease: a consumer's block of tokens. One call reports how the block was used and asks for more.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, 4 {K}:outstanding, 5 {K}:due, as in reserve
--       6 {K}:flows, 7 {K}:use: see division; only if the block is a flow's
-- ARGV  1 id
--       2 seq: 1 for the block's first call, one more with every further one
--       3 keep: tokens that the consumer still holds
--       4 back: tokens that it gives back; tokens that it held and neither keeps nor gives back are spent
--       5 want: most tokens to add to the block
--       6 ttl_us: when the block ends unless it is renewed, at least 1
--       7 the flow; only with KEYS 6 and 7
-- Reply {1, now_us, tokens, granted, clamped, era, pol}: tokens are those left in the bucket; clamped is the number of
--           tokens given back that the full bucket had no room for
--       {2}: no such bucket, or one without a policy
--       {3, k}: KEYS k holds something else
--       {4, now_us}: the bucket is in another era than the block, which has ended; nothing is returned
--       {5}: the id is of something else, the consumer can't hold that much, or seq is neither that of the last call
--           nor one more
--       {6}: there is no such block, because it has ended
--
-- If the last call is sent again, it gets the same granted and clamped, and does nothing more. A block gets at most
-- half of the bucket's tokens, so that the other half is left to takes. It ends when no tokens are left in it.
--
-- The number of tokens for a flow's block is also limited as in a take of up to that number for the flow. While the
-- flow has a right, or has asked for little in this period, it may get any tokens. After that it gets only those above
-- the floor. The tokens that it gets are counted as demand of the flow. If the block gives back tokens for which the
-- flow paid, the flow gets that right back.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
--#include shared/outstanding
--#include shared/division
--#include shared/named
--#include shared/unwritten
local refused, s, p, before, r = read_outstanding(ARGV[1])
if refused then return unwritten(KEYS[3], refused) end
local seq = ARGV[2] + 0
local keep = ARGV[3] + 0
local back = ARGV[4] + 0
local want = ARGV[5] + 0
if r and (r.kind ~= LEASE or (seq ~= r.seq and (seq ~= r.seq + 1 or keep + back > r.n))) then
  return unwritten(KEYS[3], {5})
end
if not r and seq ~= 1 then return unwritten(KEYS[3], {6}) end
if not r and keep + back > 0 then return unwritten(KEYS[3], {5}) end
local now = now_us()
local function finish(tokens)
  tokens = end_due(s, p, tokens, now, SWEPT)
  find_due(s)
  put_tokens(tokens, before)
  put(s, p, KEYS[3])
  return tokens
end
if r and r.era ~= s.era then
  s.out = max(0, s.out - r.n)
  drop_record(ARGV[1])
  finish(before)
  return {4, now}
end
if r and seq == r.seq then
  return unwritten(KEYS[3], {1, now, before, r.granted, r.clamped, s.era, policy_text(s, p)})
end
local turn = KEYS[6] and read_flow(KEYS[6], ARGV[7])
if turn == false then return {3, 6} end
if r then s.out = max(0, s.out - r.n) + keep end
local tokens, _, clamped = give_back(s, p, before, back, s.era)
local granted = min(want, floor(max(0, tokens) / 2))
-- free are the tokens of the block for which the flow did not pay. Those that it paid for count as spent first.
local free = r and min(r.free, keep + back) or 0
local paid = 0
if turn then
  if back - free > clamped then pay_back(turn, back - free - clamped) end
  if granted > 0 then
    local field, before_in_period = ask(KEYS[7], turn.flow, turn.narrow, turn.wide, 0)
    granted, paid = serve(turn.flow, turn.narrow, turn.wide, 0, granted, 0, before_in_period, tokens)
    if field then call('HINCRBY', KEYS[7], field, decimals(granted)) end
  end
  write_rights(KEYS[6])
end
if KEYS[6] then free = max(0, free - back) + granted - paid end
tokens = tokens - granted
local ends = now + ARGV[6]
if keep + granted > 0 then
  s.out = s.out + granted
  local text = decimals(LEASE, keep + granted, ends, s.era, seq, granted, clamped)
  if free > 0 then text = text .. ' ' .. decimals(free) end
  put_text(ARGV[1], ends, text)
elseif r then
  drop_record(ARGV[1])
end
tokens = finish(tokens)
outlive(ends, now)
return {1, now, tokens, granted, clamped, s.era, policy_text(s, p)}
