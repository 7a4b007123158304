-- lazy: takes from, peeks at or returns to a bucket of a lazy template. Each call first credits the bucket, as a call
-- of limit/lazy does.
--
-- KEYS  1 {K}:lazy   the instant at which the bucket is full, as in shared/ahead; missing if the bucket is full
--       2 {K}:override the policy of this key alone, if it has one (see policy); left out if the caller has just read
--         it and sends it in ARGV
-- ARGV  1 1 take, 0 peek, -1 return
--       2 in_line: 1 if no take may overtake another: after one that doesn't fit, no further one is made; 0 otherwise
--       3 tokens, 4 per_us (the rate in lowest terms), 5 capacity: those of the template; if KEYS 2 is left out, those
--         of the override that the caller has read
--       6.. runs n, count, leave, as in takes; a peek or a return has one of count 1
-- Reply {1, left, reset_us, now_us, pol}: all taken, or returned; reset_us until the bucket is full; pol of KEYS 2, or
--       ''
--       {0, left, reset_us, now_us, pol, taken, wait_us, ...}: not all were taken, or it was a peek; per run taken is
--           how many of its takes were made, and wait_us the time until n tokens and those to be left are due (0 if all
--           takes were made, -1 if never)
--       {3, 1}: KEYS 1 holds something else
--#include shared/redis
--#include shared/ahead
--#include shared/leave
--#include shared/unwritten
local now = now_us()
local tokens = tonumber(ARGV[3])
local per_us = tonumber(ARGV[4])
local capacity = tonumber(ARGV[5])
local pol = KEYS[2] and get_text(KEYS[2]) or ''
local own_capacity, own_tokens, own_per = string.match(pol, '^%d+ 2 (%d+) (%d+) (%d+) ')
if own_per then
  tokens = tonumber(own_tokens)
  per_us = tonumber(own_per)
  capacity = tonumber(own_capacity)
else
  pol = ''
end
local full = capacity * per_us
local lacks = ahead(KEYS[1], now, tokens)
if not lacks then return {3, 1} end
local d = lacks
local what = ARGV[1]
local served = {}
local all = true
local closed = false
for i = 6, #ARGV, 3 do
  local n, most = math.max(1, tonumber(ARGV[i])), tonumber(ARGV[i + 1])
  local fit = 0
  if what == '-1' then
    d = math.max(0, d - n * per_us)
    fit = most
  elseif what == '1' and not closed then
    local free = full - d - least(ARGV[i + 2], capacity) * per_us
    fit = math.max(0, math.min(most, math.floor(free / (n * per_us))))
    d = d + fit * n * per_us
  end
  if fit < most then
    all = false
    closed = ARGV[2] == '1'
  end
  served[#served + 1] = fit
end
local reset = math.ceil(d / tokens)
if d ~= lacks then reset = store_ahead(KEYS[1], now, tokens, d) end
local left = math.max(0, math.floor((full - d) / per_us))
if all then return {1, left, reset, now, pol} end
local reply = {0, left, reset, now, pol}
for i = 6, #ARGV, 3 do
  local n = math.max(1, tonumber(ARGV[i])) + least(ARGV[i + 2], capacity)
  local fit = served[i / 3 - 1]
  local wait = 0
  if fit < tonumber(ARGV[i + 1]) then
    wait = n > capacity and -1 or math.max(0, math.ceil((d + n * per_us - full) / tokens))
  end
  reply[#reply + 1] = fit
  reply[#reply + 1] = wait
end
if what == '0' then return reply end
return unwritten(KEYS[1], reply)
