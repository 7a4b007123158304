-- takemany: several takes in one call, one after the other, each all or nothing.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  1 the tokens of all takes together
--       2 1 to be told the policy as well, 0 otherwise
--       3 1 if no take may overtake another: none is made behind one that doesn't fit; 0 otherwise
--       4.. pairs n, count: so many takes of n tokens each follow one another; both at least 1
-- Reply an integer: all taken; the tokens left (ARGV 2 is 0)
--       {1, left, pol}: all taken, with the policy's text, as in take
--       {0, left, era, index, last_us, now_us, pol, taken, wait_us, ...}: not all; per pair how many of its takes were
--             taken, the first ones, and how long until n tokens are due, as in take (0 if all were taken)
--       {2}: no such bucket; nothing is created
--       {3, k}: KEYS k holds something else
--
-- The same takes sent one by one in this order have the same answers (ARGV 3 is 0), and denials of a pool's bucket are counted as take
-- counts them. When all fit it costs one command.
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
left = redis.call('INCRBY', KEYS[1], ARGV[1])
local s, p, pol = read_ctl(KEYS[3])
local index = get(KEYS[2])
-- An empty key without index and state is what DECRBY made of a missing one.
local unknown = left == 0 and not s and not index
if unknown then redis.call('DEL', KEYS[1]) end
if s == false then return {3, 3} end
if index == false then return {3, 2} end
if unknown then return {2} end
local served, all, closed = {}, 0, false
for i = 4, #ARGV, 2 do
  local n = tonumber(ARGV[i])
  -- Tokens only fall, so the takes of a run that fit are its first ones.
  local fit = closed and 0 or math.max(0, math.min(tonumber(ARGV[i + 1]), math.floor((left - all) / n)))
  closed = closed or ARGV[3] == '1' and fit < tonumber(ARGV[i + 1])
  served[#served + 1] = fit
  all = all + fit * n
end
if all > 0 then left = redis.call('DECRBY', KEYS[1], string.format('%.0f', all)) end
local now = now_us()
local reply = s and {0, left, s.era, index or s.index, s.last, now, told(s, p, pol)} or {0, left, 0, index or 0, 0, now, ''}
local denied = 0
for i = 4, #ARGV, 2 do
  local n, fit, wait = tonumber(ARGV[i]), served[i / 2 - 1], 0
  local rest = tonumber(ARGV[i + 1]) - fit
  if rest > 0 then
    wait = s and wait_us(s, p, left, n, now) or -1
    if s and n <= p.capacity then denied = denied + rest * n end
  end
  reply[#reply + 1] = fit
  reply[#reply + 1] = wait
end
if denied > 0 and p.counts_denied then redis.pcall('HINCRBY', KEYS[3], 'denied', string.format('%.0f', denied)) end
return reply
