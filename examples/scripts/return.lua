-- return: gives n tokens back to the bucket, up to its capacity. Under a strict policy the limit is the capacity less
-- the outstanding tokens.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in refill
--       4 {K}:flows: see division; only if a flow paid for some of the tokens with its right
-- ARGV  1 n: tokens to give back, at least 1
--       2 the era in which they were taken; 0 for any
--       3 the flow; 4 paid: tokens for which the flow paid with its right. It gets the right back for as many of them
--         as go back; only with KEYS 4
-- Reply {1, tokens, clamped}: tokens after the call; clamped is how many had no room, because the bucket is full or K
--         is missing
--       {2}: no such bucket, or one without a policy, whose capacity is unknown; nothing is created
--       {3, k}: KEYS k holds something else
--       {4, tokens}: the bucket is in another era; nothing is returned
--
-- A return does not count as a refill, so the index and the state stay as they are.
-- Shared by the scripts that read keys; it comes before the other pieces.
local EXACT = 9007199254740992 -- 2^53; 2^53 + 1 is read as this too, so only smaller numbers are valid

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- wrong_type returns false if the error says that a key has another type. It raises every other error.
local function wrong_type(reply)
  if not string.find(reply.err, 'WRONGTYPE') then error(reply) end
  return false
end

-- get_text reads a string: nil if the key is missing, false if it holds something else.
local function get_text(key)
  local v = redis.pcall('GET', key)
  if type(v) == 'table' then return wrong_type(v) end
  return v or nil
end

-- get_integer reads a decimal integer: nil if the key is missing, false if it holds something else. It accepts only
-- numbers that INCRBY accepts and that doubles hold exactly. Otherwise a write could fail after another was made.
local function get_integer(key)
  local v = get_text(key)
  if not v then return v end
  if v ~= '0' and not string.find(v, '^%-?[1-9]%d*$') then return false end
  local n = v + 0
  return n < EXACT and n > -EXACT and n
end
-- Shared by the scripts that read a bucket's policy. A script's line "--#include shared/policy" is replaced by this
-- file. pol is a text of decimal integers with a space between, in the order of fields. Zeros at the end are left out
-- from the seventh number on.
--   kind         0 plain, 1 stepped, 2 of a template, 3 of a pool, 4 a budget, which is stepped and of a template
--   per          µs; of a stepped policy a number that names its schedule
--   interval     µs, as is grant_end
--   lacking      the capacity less the tokens of a new bucket
--   enforcement  the number of the degraded mode; 4 is added in shadow mode, and 8 if the bucket has flows
local STEPPED = 1
local TEMPLATE = 2
local POOL = 3
local BUDGET = 4
local call, pcall = redis.call, redis.pcall -- pcall answers an error as a reply
local find = string.find
local format = string.format
local match = string.match
local sub = string.sub
local floor = math.floor
local max = math.max
local min = math.min
local policies = {}

local function fields()
  return {'version', 'kind', 'capacity', 'tokens', 'per', 'interval', 'lacking', 'on_loss', 'on_rollback', 'carry_over',
    'enforcement', 'strict', 'pools_version', 'epoch', 'seq', 'grant_tokens', 'grant_end', 'grant_era'}
end

-- policy returns the policy that the text pol describes; false if it can't be read. A script decodes each text once.
local function policy(text)
  local p = policies[text]
  if p ~= nil then return p end
  policies[text] = false
  local version, kind, capacity, tokens, per, interval, rest =
    match(text, '^(%d+) ([0-4]) (%d+) (%d+) (%d+) (%d+)([ %d]*)$')
  if not version or capacity + 0 == 0 or per + 0 == 0 or interval + 0 == 0 then return false end
  p = {text = text, version = version + 0, kind = kind + 0, capacity = capacity + 0, tokens = tokens + 0, per = per + 0,
    interval = interval + 0, lacking = 0, on_loss = 0, on_rollback = 0, carry_over = 0, enforcement = 0, strict = 0,
    pools_version = 0, epoch = 0, seq = 0, grant_tokens = 0, grant_end = 0, grant_era = 0}
  if rest ~= '' then
    local names, n = fields(), 6
    for word in string.gmatch(rest, '%d+') do
      n = n + 1
      if n > #names then return false end
      p[names[n]] = word + 0
    end
  end
  p.stepped = p.kind == STEPPED or p.kind == BUDGET
  p.expires = p.kind == TEMPLATE or p.kind == BUDGET
  p.half = floor(p.interval / 2)
  -- The longest time that one refill credits: the time that fills the bucket, but no more than 2 s or five intervals.
  p.max_elapsed = min(math.ceil(p.capacity * p.per / p.tokens), max(2000000, 5 * p.interval))
  p.life_s = 1000000000 -- of a budget whose schedule isn't known
  if p.kind == TEMPLATE then
    -- The time after which a bucket expires once it was armed, and the number of refills after which that is checked.
    p.life_s = min(max(60, 2 * p.capacity * p.per / p.tokens / 1000000), p.life_s)
    p.refills_per_check = max(1, floor(p.life_s * 1000000 / (8 * p.interval)))
  end
  policies[text] = p
  return p
end
-- Shared by the scripts that open a bucket. Include it after redis and policy. {K}:ctl is a hash:
--   st   era last_us index carry, and of a stepped bucket step_us next_us. They are decimal, with one space between.
--        era and the instants are 16 characters wide, with spaces in front. If there is a field out, a + comes after
--        carry; in a stepped bucket it replaces the space. index is a copy of {K}, as our last write left it. last_us
--        is also the latest time that the clock has shown
--   pol  the policy in force: see policy
--   out  outstanding due_us debt; missing while all three are 0. outstanding are the tokens in reservations and leases.
--        due_us is when the first of these ends; 0 if there is none; or UNCOUNTED. debt are tokens that refills pay
--        before they add any
--   lowered  when a template's bucket last got a lower capacity or was adopted, µs; missing if that never happened
-- A pool's bucket has two more fields. added counts the tokens that refills added. denied counts the tokens that takes
-- were denied. The number of tokens that were consumed is the number in added less the change of K. A bucket in shadow
-- mode has the field denied, too.
local TOLERANCE_US = 50000

-- open reads {K}:ctl into s and returns the policy in force; nil if the key is missing, false if it can't be read.
local function open(s, key)
  local c = pcall('HMGET', key, 'st', 'pol', 'out')
  if c.err then return wrong_type(c) end
  local st = c[1]
  local pol = c[2]
  local out = c[3]
  if not st and not pol then return nil end
  local p = pol and policy(pol)
  local era, last, index, carry, rest = match(st or '', '^( *%d+) ( *%d+) (%d+) (%d+)(.*)$')
  if not p or not era or #era ~= 16 or #last ~= 16 then return false end
  s.era = era + 0
  s.index = index + 0
  s.last = last + 0
  s.carry = carry + 0
  s.step = 0
  s.next = 0
  s.out = 0
  s.due = 0
  s.debt = 0
  if p.stepped then
    local step, following = match(rest, '^[+ ]( *%d+) ( *%d+)$')
    if not step then return false end
    s.step, s.next = step + 0, following + 0
  elseif rest ~= (out and '+' or '') then
    return false
  end
  s.was_out = out
  if out then
    local n, due, debt = match(out, '^(%d+) (%d+) (%d+)$')
    if not n then return false end
    s.out = n + 0
    s.due = due + 0
    s.debt = debt + 0
  end
  return p
end

-- put writes s. p is the policy in force. pol is written if it is given.
local function put(s, p, key, pol)
  local st = format('%16d %16d %d %d', s.era, s.last, s.index, s.carry)
  local out = s.out ~= 0 or s.due ~= 0 or s.debt ~= 0
  if p.stepped then
    st = st .. format(out and '+%16d %16d' or ' %16d %16d', s.step, s.next)
  elseif out then
    st = st .. '+'
  end
  call('HSET', key, 'st', st)
  if pol then call('HSET', key, 'pol', pol) end
  if out then
    call('HSET', key, 'out', format('%d %d %d', s.out, s.due, s.debt))
  elseif s.was_out then
    call('HDEL', key, 'out')
  end
  s.was_out = out
end

-- next_era returns the era that follows another one: the present time. If the present is not later than that era,
-- because the clock was ahead, it returns a later number that depends on the present. Otherwise two callers that
-- remember the same era could begin two histories with the same next era.
local function next_era(era, now) return now > era and now or era + 1 + now % 1000000 end

-- UNCOUNTED is the due_us of a bucket that may have records which its state does not count. This is so if the state was
-- lost and the records were not. UNCOUNTED is an instant in the past, so the refiller sweeps the bucket after its next
-- refill. That sweep counts the records, and so does the next reservation or lease.
local UNCOUNTED = 1

-- presume sets s.out, the tokens that count as outstanding, while records are uncounted. It is called when a bucket
-- that holds tokens gets policy q. p is the policy before; nil if the bucket begins without state.
--
-- Under a strict policy all tokens that the bucket lacks count as outstanding, so that no refill replaces tokens that
-- are held. A bucket whose policy wasn't strict may have lost its state without a count of its records. So if its new
-- policy is strict, presume sets its due_us to UNCOUNTED.
local function presume(s, p, q, tokens)
  if q.strict == 1 and not (p and p.strict == 1) and s.due == 0 then s.due = UNCOUNTED end
  if s.due == UNCOUNTED then s.out = q.strict == 1 and q.capacity - min(max(0, tokens), q.capacity) or 0 end
end

-- record_lowered records that the capacity of a template's bucket is lowered now, because policy q replaces p. p is nil
-- if the policy before was lost; then q may have the lower capacity. Without the record, the bucket would leave the
-- active set at once if it is full under the lower capacity. A consumer that still uses the higher capacity would then
-- call take, which adds no bucket to the set.
local function record_lowered(key, p, q, now)
  if q.kind == TEMPLATE and (not p or q.capacity < p.capacity) then call('HSET', key, 'lowered', format('%d', now)) end
end

-- room returns the most tokens that the bucket may hold. This is its capacity or, under a strict policy, its capacity
-- less the outstanding tokens.
local function room(s, p)
  if p.strict == 1 then return max(0, p.capacity - s.out) end
  return p.capacity
end

-- excess returns how many of n more tokens have no room in a bucket that holds tokens. If tokens is below 0, it counts
-- as 0, because plain clients are about to undo their tries. A bucket that lost K has no room: a refill creates K
-- again, with the tokens that on_loss sets.
local function excess(s, p, tokens, n)
  if s.lost then return n end
  return min(n, max(0, max(tokens, 0) + n - room(s, p)))
end

-- after_loss returns the tokens of a bucket that lost K.
local function after_loss(p) return p.on_loss == 1 and p.capacity or 0 end

-- altered returns policy p with some numbers replaced.
local function altered(p, numbers)
  local words, most = {}, 6
  for i, name in ipairs(fields()) do
    words[i] = format('%d', numbers[name] or p[name])
    if i > most and words[i] ~= '0' then most = i end
  end
  return policy(table.concat(words, ' ', 1, most))
end

-- same_amounts reports whether two policies have the same capacity and the same rate or schedule. Only a change of
-- these makes carry_over apply. A change of the fence, a grant or the degraded mode, for example, does not.
local function same_amounts(p, q)
  local kind_kept = p.stepped == q.stepped
  return kind_kept and p.capacity == q.capacity and p.tokens == q.tokens and p.per == q.per
end

-- carried returns the tokens and the carry that remain when policy q replaces p. If the amounts are the same, both
-- remain. Nothing is ever added.
local function carried(p, q, tokens, carry)
  if same_amounts(p, q) then return tokens, carry end
  if p.stepped ~= q.stepped or q.carry_over == 2 then
    carry = 0
  elseif q.per ~= p.per then
    carry = max(0, floor(carry / p.per * q.per) - 1)
  end
  if q.carry_over == 2 then
    tokens = min(tokens, 0)
  elseif q.carry_over == 1 and q.capacity < p.capacity and tokens > 0 then
    tokens = min(tokens, floor(tokens / p.capacity * q.capacity))
  end
  return tokens, carry
end
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
-- Shared by the scripts that know a flow by its name. Include it after division.

-- fields_of returns the fields of a plan that a take for a flow needs: /, those of its teams, and its own.
local function fields_of(flow)
  local wide = match(flow, '^[^/]+/')
  local narrow = match(flow, '^[^/]+/[^/]+/')
  if narrow then return {'/', wide, narrow, flow} end
  if wide then return {'/', wide, flow} end
  return {'/', flow}
end

-- read_flow reads the part of a bucket's plan that a flow needs. It returns the places of the flow and of its teams
-- among the fields; nil if the bucket isn't divided, false if the plan can't be read.
local function read_flow(flows, flow)
  local needed = fields_of(flow)
  local last = #needed
  local divided, err = read_division(flows, needed, 1, last)
  if err then wrong_type(err) end
  return divided and {flow = last, narrow = last - 1, wide = max(1, last - 2)} or divided
end

-- pay_back gives a flow the right to n tokens back, up to the most that a flow may save.
local function pay_back(turn, n)
  local at = right(turn.flow, turn.narrow, turn.wide)
  if not at then return end
  local left = clock - used[at]
  local most = max(span, math.ceil(max(LEAST_SAVED, TAKES_SAVED * n) * prices[at]))
  if left >= most then return end
  used[at] = clock - min(most, left + floor(n * prices[at] + 0.5))
  spent = true
end

-- charge makes a flow pay for n tokens, whether it has a right to them or not.
local function charge(turn, n)
  local at = right(turn.flow, turn.narrow, turn.wide)
  if not at then return end
  used[at] = clock - saved(at, n) + floor(n * prices[at] + 0.5)
  spent = true
end
-- Shared by the scripts that may reply without a write.
--
-- unwritten returns the reply if the server accepts writes. Otherwise it returns the server's error. A server refuses
-- all writes if it is an old master (READONLY), a master without its replicas (NOREPLICAS), or one that can't write to
-- its disk (MISCONF). The data of the first two may be out of date, and none of them can be refilled.
--
-- To find out, unwritten sends a command that writes but deletes nothing, whatever the key holds. That is the last
-- command of the script: a server without memory refuses the first write of a script, and no later one.
local function unwritten(key, reply)
  local deleted = redis.pcall('HDEL', key, '')
  if type(deleted) ~= 'table' then return reply end
  for _, refusal in ipairs({'READONLY', 'NOREPLICAS', 'MISCONF'}) do
    if string.find(deleted.err, refusal) then return deleted end
  end
  return reply
end
local s = {}
local p = open(s, KEYS[3])
if p == false then return {3, 3} end
if not p then return unwritten(KEYS[3], {2}) end
local tokens = get_integer(KEYS[1])
if tokens == false then return {3, 1} end
s.lost, tokens = not tokens, tokens or 0
if ARGV[2] ~= '0' and ARGV[2] + 0 ~= s.era then return unwritten(KEYS[3], {4, tokens}) end
local n = ARGV[1] + 0
local clamped = excess(s, p, tokens, n)
if clamped == n then return unwritten(KEYS[3], {1, tokens, clamped}) end
local turn = KEYS[4] and read_flow(KEYS[4], ARGV[3]) -- a plan that can't be read has no rights
tokens = call('INCRBY', KEYS[1], format('%d', n - clamped))
if turn then
  pay_back(turn, min(ARGV[4] + 0, n - clamped))
  write_rights(KEYS[4])
end
return {1, tokens, clamped}
