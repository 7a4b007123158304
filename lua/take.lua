-- take: takes tokens from buckets and reads only K. Per bucket it makes all takes or none.
--
-- KEYS  K of each of n buckets, each once
-- ARGV  per bucket the tokens of all its takes together
--       then any number of bounds, of three each: the number, from 1, of the first bucket that it is for; leave: tokens
--       that must be left; below: how many tokens the bucket must hold fewer than, -1 for any number. A bound applies
--       from its bucket to the one before the next bound. Before the first bound, leave is 0 and below is -1
-- Reply per bucket the tokens left; or -1: nothing was taken, since the takes don't all fit, or the bucket is missing,
--       holds something else, or is not below its bound: takes gives the answer
--
-- A take that fits costs one command.

-- Locals, since Lua would have to find a global anew for each bucket.
local KEYS = KEYS
local ARGV = ARGV
local call = redis.call
local pcall = redis.pcall
local n = #KEYS
local bound = n + 1
local bounded = tonumber(ARGV[bound]) -- the next bucket that a bound is for
local leave = 0
local below = -1
local reply = {}
local there = call('EXISTS', unpack(KEYS)) == n -- DECRBY makes a key that is missing, so it needs one that exists
for i = 1, n do
  if i == bounded then
    leave = tonumber(ARGV[bound + 1])
    below = tonumber(ARGV[bound + 2])
    bound = bound + 3
    bounded = tonumber(ARGV[bound])
  end
  local key = KEYS[i]
  local total = ARGV[i]
  local left = -1
  if there or call('EXISTS', key) == 1 then
    left = pcall('DECRBY', key, total)
    if type(left) == 'table' then
      -- Every other error comes with the first write, before anything is taken.
      local err = left.err
      if not (err:find('WRONGTYPE') or err:find('not an integer') or err:find('would overflow')) then return left end
      left = -1
    elseif left < leave or (below >= 0 and left + total >= below) then
      call('INCRBY', key, total)
      left = -1
    end
  end
  reply[i] = left
end
return reply
