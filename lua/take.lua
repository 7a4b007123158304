-- take: takes tokens from buckets, and reads only K of each. It makes all takes of a bucket or none.
--
-- KEYS  K of each of n buckets, each once
-- ARGV  per bucket the tokens of all its takes together
--       then any number of bounds, each of three numbers: the number, from 1, of the first bucket to which the bound
--       applies; leave: tokens that must be left; below: the bucket must hold fewer tokens than this, -1 for any
--       number. A bound applies up to the bucket before the next bound. Before the first bound, leave is 0 and below
--       is -1
-- Reply per bucket the tokens left, or -1 if nothing was taken. Nothing is taken if the takes don't all fit, if the
--       bucket is missing or holds something else, or if it is not below its bound. The caller then asks takes.lua
--
-- A take that fits costs one command.

-- These are locals because Lua would search for a global again for each bucket.
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
local there = call('EXISTS', unpack(KEYS)) == n -- DECRBY would create a missing key
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
      -- Any other error comes from the first write of the script, so nothing has been taken yet.
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
