-- plan: writes the plan by which a bucket is divided among its flows, and reads the demand of the flows.
--
-- KEYS  1 K
--       2 {K}:flows  the plan: see division
--       3 {K}:use    what the flows asked for
-- ARGV  1 era, 2 index: of the refill that the plan comes with
--       3 era, 4 index: of the plan that this one changes; era 0 if this one replaces any plan
--       5 kept: 1 if a plan that is there stays in force; only the time of its end changes
--       6 read: 1 to read the demand, and begin a period
--       7 floor, 8 unlisted, 9 most, 10 span_us, 11 price: see division
--       12 lasts_ms: how long the plan counts
--       13 how many teams follow; of each: its name with a slash, price, rest
--       then how many flows follow: those that are listed anew, or all of the list if the plan replaces any; of each:
--         name; weight; took: tokens that it took lately
--       then the flows and teams that this plan drops
-- Reply {1, now_us, clock_us, covered_us, {field, value, ...}}: of {K}:use, and the time that it covers, 0 if it wasn't
--           read
--       {0}: the plan of this or a later refill is there, or the plan that this one changes is not; nothing is written
--       {3, k}: KEYS k holds something else
--
-- The clock of the division advances by the time since it was last advanced. If the server's clock was set back, it
-- does not advance. If the bucket holds less than four fifths of the floor, it advances more slowly: by that time
-- multiplied by the square of the tokens' part of four fifths of the floor. Otherwise flows would get more rights than
-- there are tokens. A flow that is listed anew begins with the right to a tenth of the floor, less the tokens that it
-- took. A new rest begins with all that it may save.
--#include shared/redis
--#include shared/policy
--#include shared/unwritten
local PART = 1000 -- fields of one command
local LEAST_SAVED = 5
local TENTH = 10
local FULL_ABOVE = 1.25
local whole = ARGV[3] == '0' -- no era is
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end

-- field reads a field: false if it is missing, nil if the key holds something else.
local function field(key, name)
  local text = pcall('HGET', key, name)
  if type(text) ~= 'table' then return text end
  wrong_type(text)
end

local header = field(KEYS[2], '/')
if header == nil then return {3, 2} end
local began = field(KEYS[3], '//')
if began == nil then return {3, 3} end
local WIDE = '%16d '
local HEADER = 137 -- where the price begins

-- number returns the nth number of a field. It can't return the last one, whose width isn't constant.
local function number(text, n) return sub(text, 17 * n - 16, 17 * n - 1) + 0 end

local there = header and #header >= HEADER
local was = there and {clock = number(header, 1), floor = number(header, 3), at = number(header, 6),
  era = number(header, 7), index = number(header, 8)}

-- later reports whether the plan that is there came with the refill of era and index or with a later one.
local function later(era, index) return was.era > era or was.era == era and was.index >= index end

if there and later(ARGV[1] + 0, ARGV[2] + 0) or
  not whole and not (there and was.era == ARGV[3] + 0 and was.index == ARGV[4] + 0) then
  return unwritten(KEYS[1], {0}) -- a field of the plan may have an empty name
end
local now = now_us()
local clock = now
if there then
  local held = max(0, tokens or 0)
  local full = held < was.floor and min(1, held * FULL_ABOVE / was.floor) or 1
  clock = was.clock + floor(max(0, now - was.at) * full * full)
end

-- in_parts calls a command for the fields of a list, PART of them at a time.
local function in_parts(command, fields)
  for i = 1, #fields, PART do call(command, KEYS[2], unpack(fields, i, min(#fields, i + PART - 1))) end
end

-- old_texts returns all fields of the plan that is there, if it is replaced.
local function old_texts()
  local old = {}
  local all = whole and call('HGETALL', KEYS[2]) or {}
  for i = 1, #all, 2 do old[all[i]] = all[i + 1] end
  return old
end

-- replace writes a header, teams and flows, and drops those that are planned no longer.
local function replace(new)
  local old = old_texts()
  local fields, gone = {}, {}
  local prices = {}
  local at = 13
  local function arg()
    at = at + 1
    return ARGV[at]
  end
  local function put(field, text)
    fields[#fields + 1] = field
    fields[#fields + 1] = text
    old[field] = nil
  end
  put('/', new)
  for _ = 1, ARGV[13] + 0 do
    local name = arg()
    local price, rest = arg(), arg()
    local used = 0
    if rest + 0 > 0 then
      used = clock - max(ARGV[10] + 0, math.ceil(LEAST_SAVED * rest))
      local before = old[name] or not whole and call('HGET', KEYS[2], name)
      if before then used = max(used, number(before, 1)) end -- 0 of a team that had no rest
    end
    prices[name] = price
    put(name, format(WIDE, used) .. format('%16s ', price) .. rest)
  end
  local begins = max(LEAST_SAVED, floor(ARGV[7] / TENTH))
  for _ = 1, arg() + 0 do
    local name = arg()
    local weight, took = arg(), arg()
    local used = old[name] and number(old[name], 1)
    if not used then
      local team = match(name, '^[^/]+/[^/]+/') or match(name, '^[^/]+/')
      local price = (team and prices[team] or ARGV[11]) / weight
      used = clock - floor((begins - took) * price + 0.5)
    end
    put(name, format(WIDE, used) .. weight)
  end
  if whole then
    for field in pairs(old) do gone[#gone + 1] = field end
  end
  for i = at + 1, #ARGV do gone[#gone + 1] = ARGV[i] end
  in_parts('HSET', fields)
  in_parts('HDEL', gone)
end

-- new_header returns the header of the plan. settings is the text of the numbers from span_us to most.
local function new_header(settings, price)
  return format(WIDE, clock) .. settings .. format(WIDE .. WIDE .. WIDE, now, ARGV[1], ARGV[2]) .. price
end

if not there then call('DEL', KEYS[2]) end -- a header that can't be read
if ARGV[5] == '0' or not there then
  replace(new_header(format(WIDE .. WIDE .. WIDE .. WIDE, ARGV[10], ARGV[7], ARGV[8], ARGV[9]), ARGV[11]))
else
  call('HSET', KEYS[2], '/', new_header(sub(header, 18, 85), sub(header, HEADER)))
end
local use = {}
local covered = 0
if not began or ARGV[6] == '1' then
  if began then
    use = call('HGETALL', KEYS[3])
    covered = now - began
  end
  call('DEL', KEYS[3])
  call('HSET', KEYS[3], '//', format('%d', now))
end
call('PEXPIRE', KEYS[2], ARGV[12])
call('PEXPIRE', KEYS[3], ARGV[12])
return {1, now, clock, covered, use}
