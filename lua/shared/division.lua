-- Shared by the scripts that take for flows; it needs the local names of functions that policy defines. {K}:flows is a
-- hash, the plan by which the bucket is divided. Without it the bucket isn't divided. It expires when the plan ends,
-- and so does {K}:use. All numbers but the last one of a field are 16 characters wide, with spaces in front:
--   /      clock_us span_us floor unlisted most at_us era index price
--   TEAM/  used_us price rest
--   FLOW   used_us weight: a listed flow. Its right is the time of the clock since used_us
-- clock_us is how long the bucket has served its flows at the speed of its rate. span_us is the longest time for which
-- a flow saves its right. floor is the number of tokens that a flow without a right leaves in the bucket. unlisted is
-- the number of tokens per period that an unlisted flow may take as if it had a right. most is the largest number of
-- fields of {K}:use; those of listed flows don't count. There may be a tenth more for teams; those of the plan don't
-- count. at_us is when the clock was last advanced. era and index are those of the refill with which the plan came.
-- price is the time of the clock, in µs, that a flow of weight 1 pays for a token. The price in / is for flows without
-- a team, and the price in a team's field is for the flows of the team. The unlisted flows of a team may share one
-- right, which is used up to used_us. rest is the price for that right; 0 if there is none.
--
-- {K}:use is a hash of the tokens that were asked for in this period, by FLOW. If there are too many names, it counts
-- by TEAM/, and if there are too many teams, by the team above, finally by /. Fields /!FLOW and /!TEAM/ are the denied
-- tokens among them. Field // is the beginning of the period, in µs.
--
-- Prices are decimal numbers with a fraction or an exponent. They decide who takes first, never how many tokens there
-- are.
local LEAST_SAVED = 5
local TAKES_SAVED = 4
local UP_TO_OF_FLOOR = 10
local MORE_FOR_TEAMS = 1.1

-- The variables below belong to the present bucket. A flow and a team are named by their places among the fields that
-- were read; 1 is no team.
local fields -- what was read
local list, names -- that has the names of the fields, and the place before the first one
local clock, span, price, reserve
local used, prices -- of the rights that were read, by the place of the flow or team
local uncounted
local spent -- a right was

-- read_division reads a bucket's plan and returns true. It returns nil if the bucket isn't divided. If the plan can't
-- be read, it returns false and maybe an error. The fields to read are words[first] to words[last]: /, then teams, then
-- flows.
local function read_division(flows, words, first, last)
  fields = pcall('HMGET', flows, unpack(words, first, last))
  if fields.err then return false, fields end
  local header = fields[1]
  if not header then return nil end
  if #header < 137 then return false end
  list = words
  names = first - 1
  clock = sub(header, 1, 16) + 0
  span = sub(header, 18, 33) + 0
  price = sub(header, 137) + 0
  reserve = sub(header, 35, 50) + 0
  used, prices = {}, {}
  uncounted = false
  spent = false
  return true
end

-- advanced returns the instant at which the clock was last advanced, in µs.
local function advanced() return sub(fields[1], 86, 101) + 0 end

-- rest returns the place of the right that the unlisted flows of a team share; nil if they have none.
local function rest(at)
  local text = fields[at]
  if not text then return nil end
  local of = sub(text, 35) + 0
  if of == 0 then return nil end
  if not used[at] then
    used[at] = sub(text, 1, 16) + 0
    prices[at] = of
  end
  return at
end

-- right returns the place of the right with which a flow pays. It is the place of the flow or of one of its teams; nil
-- if the flow isn't listed and none of its teams has a rest.
local function right(flow, narrow, wide)
  local text = fields[flow]
  if text and fields[narrow] then
    if not used[flow] then
      local weight = sub(text, 18)
      local of = narrow == 1 and price or sub(fields[narrow], 18, 33) + 0
      used[flow] = sub(text, 1, 16) + 0
      prices[flow] = weight == '1' and of or of / weight
    end
    return flow
  end
  return narrow > 1 and (rest(narrow) or wide > 1 and rest(wide)) or nil
end

-- saved returns how much time of the clock a right has. A larger n, the tokens of a take, lets it save more time.
local function saved(at, n)
  local left = clock - used[at]
  if left <= span then return left end
  return min(left, max(span, math.ceil(max(LEAST_SAVED, TAKES_SAVED * n) * prices[at])))
end

-- ask_of_team counts n tokens that a flow asks for by the narrowest of its teams that is counted, as ask does.
local function ask_of_team(use, narrow, wide, n)
  local most = MORE_FOR_TEAMS * sub(fields[1], 69, 84) + 1
  for _, at in ipairs({narrow, wide, 1}) do
    local field = list[names + at]
    local asked = call('HINCRBY', use, field, n) - n
    if asked > 0 or fields[at] or call('HLEN', use) <= most then return field, asked end
    call('HDEL', use, field)
  end
end

-- ask counts n tokens that a flow asks for. It returns the field under which they count, nil for none, and the tokens
-- that were counted under it before in this period.
local function ask(use, flow, narrow, wide, n)
  if uncounted then return nil, 0 end
  local field = list[names + flow]
  local asked = pcall('HINCRBY', use, field, n)
  if type(asked) == 'table' then
    local foreign = find(asked.err, 'WRONGTYPE') or find(asked.err, 'not an integer')
    if not foreign then error(asked) end
    uncounted = true
    return nil, 0
  end
  asked = asked - n
  if asked > 0 then return field, asked end
  local counted = call('HLEN', use)
  if counted == 1 then -- Redis evicted the key: the next plan makes it again, with its expiry
    call('DEL', use)
    return nil, 0
  end
  if counted > sub(fields[1], 69, 84) + 1 and not fields[flow] then
    call('HDEL', use, field)
    return ask_of_team(use, narrow, wide, n)
  end
  return field, asked
end

-- serve makes count takes of n tokens each for a flow of a bucket that holds tokens. If n is 0, it makes one take of up
-- to count tokens. leave is the number of tokens that must be left. before is the number of tokens that the flow asked
-- for earlier in this period. While the flow has a right or asked for little in this period, its takes may use all
-- tokens of the bucket. After that they may use only the tokens above the floor. serve returns how many takes fit, or
-- how many tokens if n is 0. The second result is for how many of them, the first ones, the flow pays with its right.
local function serve(flow, narrow, wide, n, count, leave, before, tokens)
  local each = n > 0 and n or 1
  local at = right(flow, narrow, wide)
  local first = count
  if at then
    local size = n
    -- A take of up to count tokens gets at least a part of the floor.
    if n == 0 then size = min(count, max(1, floor(reserve / UP_TO_OF_FLOOR))) end
    local left = saved(at, size)
    if left <= 0 then
      first = 0
    elseif n == 0 then
      first = min(first, max(size, floor(left / prices[at])))
    elseif first > 1 then
      first = min(first, math.ceil(left / (each * prices[at])))
    end
    if tokens - leave < first * each then first = floor(max(0, tokens - leave) / each) end
    if first > 0 then
      used[at] = clock - left + floor(first * each * prices[at] + 0.5)
      spent = true
    end
  else
    first = min(first, floor(max(0, sub(fields[1], 52, 67) - before) / each))
    if first == 0 and before == 0 and each <= floor(reserve / 2) then first = 1 end
    if tokens - leave < first * each then first = floor(max(0, tokens - leave) / each) end
  end
  local paid = at and first or 0
  return first + min(count - first, floor(max(0, tokens - first * each - max(leave, reserve)) / each)), paid
end

-- changed_rights returns the fields of the rights and their texts, if one was spent; otherwise nil.
local function changed_rights()
  if not spent then return nil end
  local words, n = {}, 0
  for at, us in pairs(used) do
    words[n + 1] = list[names + at]
    words[n + 2] = format('%16d', us) .. sub(fields[at], 17)
    n = n + 2
  end
  return words
end

-- write_rights writes the rights, if one was spent.
local function write_rights(flows)
  local words = changed_rights()
  if words then call('HSET', flows, unpack(words)) end
end
