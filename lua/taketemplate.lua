-- taketemplate: takes from a bucket of a refilled template, like takemany, and creates it.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
--       4 {K}:limit  the policy of this key alone, if it has one
--       5 the active set that the bucket belongs to, 6 the count of the template's buckets alive. On a Cluster, where they are in
--         other slots, neither is given: the caller enters and counts
-- ARGV  1 the tokens of all takes together; 0 to open the bucket for what another script does to it: then ARGV 7, and no takes
--       2 1 to be told the policy as well, 0 otherwise
--       3 1 if no take may overtake another, as in takemany
--       4 the capacity as far as the caller knows; 0 if it doesn't
--       5 pol: the template's policy (text as in state.lua); '' if the caller takes the bucket for existing
--       6 most buckets of the template alive at once; 0 for no bound
--       7.. pairs n, count, as in takemany; or, if ARGV 1 is 0, how long the other script may hold tokens from now on, in s: the
--           bucket outlives that, and what is remembered of it afterwards
-- Reply an integer: all taken; the tokens left (ARGV 2 is 0)
--       {1, left, enter, was_s, till_s, pol}: all taken
--       {0, left, enter, was_s, till_s, era, index, last_us, now_us, pol, taken, wait_us, ...}: not all; per pair as in takemany
--           enter 1: the caller is to enter the bucket in the active set, if no KEYS 5 was given
--           was_s, till_s: the bucket's expiry moved from one instant to the other, 0 for none, or is the same; if it moved the
--           caller is to count that, if no KEYS 6 was given
--       {2}: no such bucket, and ARGV 5 is ''; nothing is created
--       {3, k}: KEYS k holds something else
--       {9, alive}: the bucket is new, and as many as ARGV 6 or more are alive; nothing is created
--
-- A bucket that isn't full is in the active set. A take costs one command, unless it leaves a full bucket, or less than half of one when there was more. Those two edges, denials and
-- every take that asks for the policy put right what was lost: the active set's entry and the expiry. The take that leaves
-- full also sets the last refill to now, since a full bucket is owed nothing. The caller's capacity is only a hint: the one in force
-- decides.
local left = redis.pcall('DECRBY', KEYS[1], ARGV[1])
if type(left) == 'table' then
  if string.find(left.err, 'WRONGTYPE', 1, true) or string.find(left.err, 'not an integer', 1, true) then return {3, 1} end
  return left
end
local total, full = tonumber(ARGV[1]), tonumber(ARGV[4])
if left >= 0 and ARGV[2] == '0' and left + total < full and (2 * left >= full or 2 * (left + total) < full) then return left end
--#include state
--#include expiry
local HELD_S = 150 -- a settlement is remembered for a minute, what outlives it lasts one longer; and some for the way
local last_pair = total > 0 and #ARGV or 6
local before = left + total
local s, p, pol = read_ctl(KEYS[3])
local index, now, was, till = nil, now_us(), 0, 0
local function undo(reply)
  left = redis.call('INCRBY', KEYS[1], ARGV[1])
  if left == 0 and not s and not index then redis.call('DEL', KEYS[1]) end
  return reply
end
if s == false then return undo({3, 3}) end
if left < 0 or not s then
  index = get(KEYS[2])
  if index == false then return undo({3, 2}) end
end

local fits = left >= 0
if not s then
  if ARGV[5] == '' then return undo({2}) end
  pol = redis.pcall('GET', KEYS[4])
  p = type(pol) == 'string' and policy(pol)
  if not p then
    pol = ARGV[5]
    p = policy(pol)
  end
  local new = before == 0 and not index -- what DECRBY made of a missing key, unless a foreign client took its last token
  if new then
    local needed = total == 0
    for i = 7, last_pair, 2 do needed = needed or tonumber(ARGV[i]) <= p.capacity end
    local most = tonumber(ARGV[6])
    if needed and most > 0 and KEYS[6] then
      local n = alive(KEYS[6], now)
      if n >= most then return undo({9, n}) end
    end
    if not needed then
      local reply = {0, p.initial, 0, 0, 0, 0, 0, 0, now, pol}
      for _ = 7, last_pair, 2 do
        reply[#reply + 1] = 0
        reply[#reply + 1] = -1
      end
      return undo(reply)
    end
    before = p.initial
  end
  s = {era = now, index = (index or 0) + 1, last = now, carry = 0, step = 0, next = 0, out = 0, due = 0, debt = 0}
  index = s.index
  before = math.max(0, math.min(before, p.capacity))
  fits = before >= total
  left = fits and before - total or before
  redis.call('SET', KEYS[1], string.format('%.0f', left))
  redis.call('SET', KEYS[2], string.format('%.0f', index))
  redis.call('HSET', KEYS[3], 'st', format_state(s), 'pol', pol)
elseif not fits then
  left = redis.call('INCRBY', KEYS[1], ARGV[1])
end

local served = {}
if not fits then
  local all, closed = 0, false
  for i = 7, last_pair, 2 do
    local n, most = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
    local fit = closed and 0 or math.max(0, math.min(most, math.floor((left - all) / n)))
    closed = closed or ARGV[3] == '1' and fit < most
    served[#served + 1] = fit
    all = all + fit * n
  end
  if all > 0 then left = redis.call('DECRBY', KEYS[1], string.format('%.0f', all)) end
end

local enter = 0
if left < p.capacity or total == 0 then
  if before >= p.capacity and s.last < now then
    s.last, s.carry = now, 0
    redis.call('HSET', KEYS[3], 'st', format_state(s))
  end
  local hold_s = total == 0 and tonumber(ARGV[7]) or 0
  was, till = arm(KEYS, p, now, 0.75 * ttl_s(p), hold_s > 0 and hold_s + HELD_S)
  if KEYS[5] then
    enter_set(KEYS[5], KEYS[1], till)
    count(KEYS[6], was, till, now)
  else
    enter = 1
  end
end
if fits then return {1, left, enter, was, till, pol} end
local reply = {0, left, enter, was, till, s.era, index or s.index, s.last, now, pol}
for i = 7, last_pair, 2 do
  local fit = served[(i - 5) / 2]
  reply[#reply + 1] = fit
  reply[#reply + 1] = fit < tonumber(ARGV[i + 1]) and wait_us(s, p, left, tonumber(ARGV[i]), now) or 0
end
return reply
