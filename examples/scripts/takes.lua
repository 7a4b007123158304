-- takes: takes from several buckets in one call. The takes of a bucket are made one after the other. Each take is all
-- or nothing.
--
-- KEYS  of each bucket: K, {K}:ctl
--       and, if it is of a refilled template: {K}; {K}:override, only if the bucket may be created, since a bucket that
--       exists already has the policy of its override; if the template is near (see ARGV): the shard of the active set
--       to which the bucket belongs, unless it is a budget, and the set of the template's buckets alive
-- ARGV  how many templates follow; of each: pol (see policy); most: buckets alive at once, 0 for no bound; near: 1 if
--       the sets share a slot with the buckets; schedule: see steps, '' unless its buckets are budgets
--       of each bucket:
--         template: its number, from 1; 0 for none
--         only if its buckets are budgets: schedule: for this bucket alone, '' for the template's; ended: 1 if the
--           bucket was just swept, so that another sweep would end nothing
--         create: 1 if a bucket of the template that is missing is created
--         with_policy: 1 to return the policy even if all takes fit
--         in_line: 1 if no take may overtake another: after a take that doesn't fit, no further one is made
--         hold_s: how long the script for which the bucket is opened will hold tokens. The bucket outlives that time,
--           and the time for which the end of the hold is remembered; 0 if the bucket is not opened for such a script
--         how many runs follow, 0 to open the bucket only; of each: n, count: so many takes of n tokens each, or, if n
--           is 0, one take of as many tokens as there are, up to count; leave: the tokens that must be left, or a
--           percentage of the capacity, as in 20%
-- Reply now_us, then integers of each bucket:
--         1, left, era, index, last_us, till_s, numbers, pol..., per run taken, wait_us
--            numbers: how many numbers of pol follow, in the order of its text; 0 if the policy isn't returned
--            wait_us: the time until n tokens and those to be left are due, 0 if all takes of the run were made, -1 if
--            never or unknown
--            till_s: only if the template isn't near: when the bucket expires, which the caller is to enter in the sets
--            of the template; otherwise 0
--         2: no such bucket; nothing is created
--         3, k: key k of K, {K}, {K}:ctl holds something else
--         9, alive: the bucket is new, and as many as most or more are alive; nothing is created
--         10, since_us: the instants of the schedule are not those around now_us. The caller sends the call again with
--           the instants around now_us; if since_us isn't 0, with all steps from since_us on. Nothing was written
--         11: the budget has too few tokens, or is opened, and the time of reservations or leases in it is over. The
--           caller sweeps it and sends the call again. Nothing was taken
--
-- If the same takes were sent one by one, they would get the same results.
--
-- A bucket of a template is in the template's active set while it isn't full. So a call that takes from a full bucket,
-- creates a bucket, or finds one missing from the set puts it there. It also sets the last refill to now, because a
-- full bucket has no credit. If the policy of a bucket is of an earlier version than its template's, the call first
-- switches the bucket, as a refill would. Otherwise a bucket that is full and idle would not be switched, because no
-- refill reaches it. A budget is first credited the steps that have come, each once: its state has the last step that
-- was credited.
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
-- Shared by the scripts that credit tokens. Include it after policy.
--
-- credit credits a bucket of policy p that holds tokens. If p is stepped, the credit is that of the steps; otherwise it
-- is that of the time from last to now. The credit first pays debt, and then adds tokens as far as there is room. A
-- full bucket keeps no carry. credit returns five numbers: the tokens then held; the tokens that were added or paid
-- debt; the tokens that were due but had no room; the carry; and the debt.
local function credit(p, tokens, room, now, last, carry, era, debt, steps)
  local add
  room = room + min(tokens, 0) -- below 0, plain clients are about to undo their tries, which adds tokens
  if p.stepped then
    add = steps * p.tokens
  else
    local elapsed = now - last
    if elapsed > p.max_elapsed then elapsed = p.max_elapsed elseif elapsed < 0 then elapsed = 0 end
    local units = elapsed * p.tokens + carry
    if era and p.grant_era == era then
      units = units + min(elapsed, max(0, p.grant_end - (now - elapsed))) * (p.grant_tokens - p.tokens)
    end
    carry = units % p.per
    add = (units - carry) / p.per
  end
  local paid = 0
  if debt > 0 then
    paid = min(add, debt)
    add, debt = add - paid, debt - paid
  end
  local after = tokens + add
  if after < room then return after, paid + add, 0, carry, debt end
  return room, paid + max(0, room - tokens), min(after - room, add), 0, debt
end
-- Shared by the scripts that put another policy in force, except refill. Include it after bucket and credit.

-- own_step returns 1 if the next step in the bucket's state has come; otherwise 0. If it has come, all steps up to now
-- count as credited, because the script doesn't know how many have come.
local function own_step(s, now)
  if s.step >= s.next or s.next > now then return 0 end
  s.step = now
  s.next = 0
  return 1
end

-- switch credits a bucket under its policy p, and then puts q in force. It does not count as a refill. tokens is the
-- number of the bucket's tokens. index is the value of {K}, or nil. steps is the number of steps to credit; if it is
-- nil, own_step decides. switch returns the tokens then held. The caller writes them, {K} as s.index, and s.
local function switch(s, p, q, tokens, index, now, steps)
  steps = steps or own_step(s, now)
  if (index or 0) == 0 or index == s.index then
    local _
    tokens, _, _, s.carry, s.debt = credit(p, tokens, room(s, p), now, s.last, s.carry, s.era, s.debt, steps)
  else
    s.carry = 0 -- another client moved the index, and has added the tokens of that time
  end
  tokens, s.carry = carried(p, q, tokens, s.carry)
  presume(s, p, q, tokens)
  s.index = max(index or 0, s.index) + 1
  s.last = max(s.last, now)
  return min(tokens, room(s, q))
end
-- Shared by the scripts that credit budgets. Include it after switch. A budget is a bucket of a template with a
-- schedule. No refill credits it. The call that takes from it does, and it sends the part of the schedule that the
-- script needs. That part is a text of decimal integers with a space between: full_s, and then successive instants of
-- the schedule in µs. Only the last of these instants is still to come. full_s is the instant, in seconds, a minute
-- after steps alone have filled every bucket of the template twice.

-- schedule decodes that text. It returns nil if the text is empty.
local function schedule(text)
  if text == '' then return nil end
  local instants = {}
  for word in string.gmatch(text, '%d+') do instants[#instants + 1] = word + 0 end
  local full = table.remove(instants, 1)
  return {full = full, instants = instants}
end

-- coming returns the last instant, which is the next one to come, and the instant before it. It returns nil if now is
-- not between these two.
local function coming(instants, now)
  local latest, following = instants[#instants - 1], instants[#instants]
  if now < latest or following <= now then return nil end
  return following, latest
end

-- first_step returns the first instant that counts as a new step: the middle between the last step that was credited
-- and the next one. An instant before it may be the same step, from a caller with other data of the time zone.
local function first_step(s) return s.next > s.step and floor((s.step + s.next) / 2) + 1 or s.step + 1 end

-- uncredited returns how many of the instants have come and are not credited yet. It returns nil if all of them are
-- uncredited but don't fill the bucket: then earlier instants may be uncredited, too.
local function uncredited(s, p, instants)
  local first = first_step(s)
  local most = #instants - 1
  local steps = 0
  while steps < most and instants[most - steps] >= first do steps = steps + 1 end
  if steps == most and steps * p.tokens < p.capacity + s.debt then return nil end
  return steps
end

-- advance returns how many steps are to be credited to a budget of policy p, and records them as credited in s. It
-- returns nil if the instants are not enough to know. If the call has no instants of the budget's schedule, only the
-- step that the state names is credited.
local function advance(s, p, instants, now)
  if s.step <= now and now < s.next then return 0 end
  if not instants then return own_step(s, now) end
  local following, latest = coming(instants, now)
  local steps = following and uncredited(s, p, instants)
  if not steps then return nil end
  if s.step > following then -- the clock was ahead, and the step to come may have been credited then
    s.step = following
    s.next = 0
  elseif s.step < following then
    if steps > 0 then s.step = latest end
    s.next = following
  end
  return steps
end
-- Shared by the scripts that may deny tokens. Include it after bucket.

-- policy_text returns the text of the policy for a reply, '' for none. If the policy has a grant that isn't in force,
-- grant_era is 0 in the text. Only a pool's bucket has a grant.
local function policy_text(s, p)
  if not p then return '' end
  if p.grant_era > 0 and (p.grant_era ~= s.era or now_us() >= p.grant_end) then
    return (string.gsub(p.text, '%d+$', '0'))
  end
  return p.text
end

-- count_denied adds n to the tokens that were denied, if the bucket counts them.
local function count_denied(key, p, n)
  local counts = p and (p.kind == POOL or p.enforcement % 8 >= 4)
  if counts and n > 0 then pcall('HINCRBY', key, 'denied', format('%d', n)) end
end

-- wait_us returns the time until the bucket holds n tokens, if no caller takes any. It returns 0 if the bucket holds
-- them, and -1 if it never will. The time ends with the first refill at which the tokens are due. If that refill is
-- overdue, the time is half an interval. If the outstanding tokens leave no room for n, it is at least the time until
-- the first reservation or lease ends.
local function wait_us(s, p, tokens, n, now)
  if tokens >= n then return 0 end
  if not p or n > p.capacity then return -1 end
  local need = n - tokens + s.debt
  local due
  if p.stepped then
    if s.next <= s.step then return -1 end
    due = s.next + (math.ceil(need / p.tokens) - 1) * (s.next - s.step)
  else
    local units = need * p.per - s.carry
    local last = s.last
    local granted = 0
    local t
    if now < last - TOLERANCE_US then
      last = now -- the clock went back: the next refill begins an era at this time, without a grant
    elseif p.grant_era == s.era then
      granted = max(0, p.grant_end - last)
    end
    local by_grant = granted * p.grant_tokens
    if units <= by_grant then
      t = math.ceil(units / p.grant_tokens)
    elseif p.tokens == 0 then
      return -1
    else
      t = granted + math.ceil((units - by_grant) / p.tokens)
    end
    due = last + math.ceil(t / p.interval) * p.interval
  end
  if n > room(s, p) then due = max(due, s.due) end
  local wait = due - now
  if wait < 1 then wait = floor(p.interval / 2) end
  return min(wait, EXACT)
end

-- denial counts a denied take of n tokens, and returns the values of the reply: tokens, wait_us, era, index, last_us,
-- now_us, pol. wait_us is the time until the needed tokens, and those that must be left, are due. needed is n, or 1 if
-- the take accepts fewer than n. If the bucket has no state, the numbers of the state are 0 and pol is ''.
local function denial(key, s, p, now, tokens, n, needed, leave)
  if not p then return tokens, -1, 0, 0, 0, now, '' end
  if n <= p.capacity then count_denied(key, p, n) end
  return tokens, wait_us(s, p, tokens, needed + leave, now), s.era, s.index, s.last, now, policy_text(s, p)
end
-- Shared by the scripts that take.
--
-- least returns how many tokens a take must leave in a bucket of this capacity. leave is their number, or a percentage
-- of the capacity, as in 20%. A percentage is rounded up.
local function least(leave, capacity)
  local percent = string.match(leave, '^(%d+)%%$')
  if not percent then return tonumber(leave) end
  return math.floor(capacity / 100) * percent + math.ceil(capacity % 100 * percent / 100)
end
-- Shared by the scripts that give a template's bucket its expiry. Include it after policy. To arm a bucket is to give
-- its keys an expiry. All keys of a bucket expire at the same whole second. That is twice the time in which the bucket
-- refills from empty to full, and at least a minute, after it was last armed. A budget expires a minute after steps
-- have filled it twice. Only buckets whose policy in force is a template's are armed.

-- outlast makes a set of the template live at least until till, the second in which one of its buckets expires.
local function outlast(set, till)
  local at = pcall('PEXPIRETIME', set)
  if type(at) == 'number' and at ~= -2 and at < till * 1000 then call('PEXPIREAT', set, format('%d', till * 1000)) end
end

-- first_end returns the first instant, in ms, at which one of a bucket's keys expires. It returns nil if one of the
-- keys has no expiry, or expires at the instant after or before it.
local function first_end(keys, after)
  local first
  for i = 3, 1, -1 do
    local at = pcall('PEXPIRETIME', keys[i])
    if type(at) ~= 'number' or at <= after then return nil end
    first = min(first or at, at)
  end
  return first
end

-- arm gives a bucket, whose keys are K, {K} and {K}:ctl, an expiry after life_s. It changes nothing if each key has an
-- expiry, and the time left is longer than part * life_s and longer than hold_s. It returns the second in which the
-- bucket expires, and whether arm has set it.
local function arm(keys, life_s, now, part, hold_s)
  local first = first_end(keys, now / 1000 + max(part * life_s, hold_s) * 1000)
  if first then return math.ceil(first / 1000), false end
  local till = math.ceil(now / 1000000 + max(life_s, 1.25 * hold_s))
  for i = 1, 3 do call('PEXPIREAT', keys[i], format('%d', till * 1000)) end
  return till, true
end

-- rejoin gives K and {K} the expiry of {K}:ctl. It is called when one of them was lost and created again.
local function rejoin(keys)
  local at = pcall('PEXPIRETIME', keys[3])
  if type(at) ~= 'number' or at < 0 then return end
  for i = 1, 2 do call('PEXPIREAT', keys[i], format('%d', at)) end
end

-- disarm removes the expiry of a bucket's keys.
local function disarm(keys)
  for i = 1, 3 do call('PERSIST', keys[i]) end
end

-- alive drops the expired buckets from the sorted set of those alive, and returns how many remain.
local function alive(set, now)
  local n = pcall('ZREMRANGEBYSCORE', set, '-inf', format('%d', floor(now / 1000000)))
  n = type(n) == 'number' and pcall('ZCARD', set)
  return type(n) == 'number' and n or 0
end

-- record_alive records in the set of the buckets alive that a bucket expires at the second till. If only_known is set,
-- it changes only a bucket that the set has already.
local function record_alive(set, name, till, only_known)
  local added = only_known and pcall('ZADD', set, 'XX', format('%d', till), name)
    or not only_known and pcall('ZADD', set, format('%d', till), name)
  if type(added) == 'number' then outlast(set, till) end
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
local OWN = 4503599627370496 -- 2^52, policy.OwnEpoch
local HELD_S = 150 -- a settlement is remembered for a minute, the bucket lives a minute longer, and calls take time
local now = now_us()
local reply = {now}
local arg_at = 0
local key_at = 0
local function arg()
  arg_at = arg_at + 1
  return ARGV[arg_at]
end
local function number() return arg() + 0 end
local function next_key()
  key_at = key_at + 1
  return KEYS[key_at]
end
local function say(...)
  for i = 1, select('#', ...) do reply[#reply + 1] = (select(i, ...)) end
end

-- taken makes takes from a number of tokens. It returns how many tokens are left, how many takes of each run were made,
-- and whether some take did not fit.
local function taken(runs, p, tokens, in_line)
  local made = {}
  local wanting = false
  local closed = false
  for r, run in ipairs(runs) do
    run.least = least(run.leave, p and p.capacity or 0)
    -- The number of tokens only falls. So the takes of a run that fit are its first ones.
    local fit = closed and 0 or max(0, min(run.count, floor((tokens - run.least) / run.each)))
    made[r], tokens = fit, tokens - fit * run.each
    wanting = wanting or fit < run.count
    closed = closed or in_line and fit < run.count
  end
  return tokens, made, wanting
end

-- create creates a template's missing bucket in s, or adopts a foreign client's bucket. It returns the policy and the
-- tokens. The caller writes the tokens. If the bucket may not be created, s stays as it is, and the third result is the
-- reply that gives the reason. If no take would fit into a new bucket, s stays as it is, too, and there is no third
-- result.
local function create(s, k, t, runs, tokens, index)
  local own = pcall('GET', k.override)
  local p = type(own) == 'string' and policy(own) or policy(t.pol)
  local following, latest
  if p.kind == BUDGET and k.instants then following, latest = coming(k.instants, now) end
  if p.kind == BUDGET and not following then return nil, nil, {10, 0} end
  -- A plain client that tries to take from a missing bucket leaves K with 0 tokens and nothing else. A number below 0
  -- is a try that the client is about to undo.
  tokens = tokens or 0
  local adopted = (index or 0) > 0 or tokens > 0
  if not adopted then
    local needed = #runs == 0
    for _, run in ipairs(runs) do needed = needed or run.each <= p.capacity end
    local n = needed and k.alive and t.most > 0 and alive(k.alive, now) or 0
    if n >= t.most and n > 0 then return nil, nil, {9, n} end
    tokens = p.capacity + tokens
    if not needed then return p, tokens end
  end
  tokens = min(tokens, p.capacity)
  s.era = now
  s.index = (index or 0) + 1
  s.last = now
  s.carry = 0
  s.step = latest or 0
  s.next = following or 0
  s.out = 0
  s.due = adopted and UNCOUNTED or 0
  s.debt = 0
  presume(s, nil, p, tokens)
  call('SET', k.index, format('%d', s.index))
  put(s, p, k.ctl, p.text)
  if adopted then record_lowered(k.ctl, nil, p, now) end
  return p, tokens
end

-- later returns the template's policy if it is of a later version than p, which is in force; otherwise p. An override
-- and a pool's policy stay.
local function later(t, p)
  local q = p.text ~= t.pol and p.kind ~= POOL and policy(t.pol)
  return q and q.version > p.version and q or p
end

-- follow credits the steps that have come to a budget. It also switches the bucket to the template's policy if that is
-- of a later version than the policy in force. It returns the policy then in force, the tokens, and whether it changed
-- either of them. If it did, the caller writes the tokens. If follow can't do this, it changes nothing, and its last
-- result is the reply that gives the reason.
local function follow(s, k, t, p, tokens)
  local q = later(t, p)
  local step = s.step
  local next_before = s.next
  local steps = nil
  if p.kind == BUDGET then
    local known = p.per == policy(t.pol).per or p.version == OWN -- an override follows the template's schedule
    steps = advance(s, p, known and k.instants, now)
    if not steps then return nil, nil, false, {10, first_step(s)} end
  end
  if q.kind == BUDGET and q.per ~= p.per then -- the new schedule begins now
    local following = k.instants and coming(k.instants, now)
    if not following then return nil, nil, false, {10, 0} end
    s.begins, s.following = max(s.step, now), following
  end
  if q == p and (steps or 0) == 0 then
    if s.step ~= step or s.next ~= next_before then put(s, p, k.ctl) end
    return p, tokens, false
  end
  local index = get_integer(k.index)
  if index == false then return nil, nil, false, {3, 2} end
  local after = switch(s, p, q, tokens or after_loss(p), index, now, steps)
  if s.begins then s.step, s.next = s.begins, s.following end
  call('INCRBY', k.index, format('%d', s.index - (index or 0)))
  put(s, q, k.ctl, q ~= p and q.text)
  record_lowered(k.ctl, p, q, now)
  return q, after, true
end

-- steps_of returns how many steps fill an empty bucket of a budget's policy.
local function steps_of(p) return math.ceil(p.capacity / p.tokens) end

-- life_s returns the time after which the bucket expires, in seconds. A budget lives until a minute after steps have
-- filled it twice. If an override needs more steps than the template to fill the bucket, the script doesn't know that
-- instant.
local function life_s(t, p)
  if p.kind ~= BUDGET or not t.full or steps_of(p) > t.steps then return p.life_s end
  return max(60, t.full - floor(now / 1000000))
end

-- keep is for a template's bucket that isn't full, or is opened. It gives the bucket its expiry and, unless it is a
-- budget, puts it into the active set. If the key of the set holds something else, keep leaves it as it is. before are
-- the tokens that the bucket held. changed is set if the bucket is new, was credited steps, or has another policy. keep
-- returns the till_s of the reply.
local function keep(k, t, s, p, before, hold_s, changed)
  local part = p.kind == TEMPLATE and 0.75 or changed and 1 or 0
  local till, new = arm({k.tokens, k.index, k.ctl}, life_s(t, p), now, part, hold_s > 0 and hold_s + HELD_S or 0)
  local entered
  if k.set and p.kind == TEMPLATE then
    entered = pcall('SADD', k.set, k.tokens)
    if type(entered) == 'table' then
      wrong_type(entered)
    else
      outlast(k.set, till)
    end
  end
  if k.alive and t.most > 0 and new then record_alive(k.alive, k.tokens, till) end
  if p.kind == TEMPLATE and (entered == 1 or before >= p.capacity) and s.last < now then
    s.last, s.carry = now, 0
    put(s, p, k.ctl)
  end
  return t.near and 0 or till
end

-- overdue reports whether a budget must be swept first: it has too few tokens or is opened, and the time of a
-- reservation or lease in it is over. No refiller sweeps budgets.
local function overdue(k, s, p, wanting, runs)
  return not k.ended and s.era and p.kind == BUDGET and s.due > 0 and s.due <= now and (wanting or #runs == 0)
end

local function takes(k, t, may_create, with_policy, in_line, hold_s, runs)
  local tokens, s = get_integer(k.tokens), {}
  if tokens == false then return say(3, 1) end
  local p = open(s, k.ctl)
  if p == false then return say(3, 3) end
  local changed = not p
  local why
  if p and t then
    p, tokens, changed, why = follow(s, k, t, p, tokens)
  elseif t then
    if not may_create then return say(2) end
    local index = get_integer(k.index)
    if index == false then return say(3, 2) end
    p, tokens, why = create(s, k, t, runs, tokens, index)
  end
  if why then return say(unpack(why)) end
  if not tokens and not p then return say(2) end
  local before = tokens or 0
  local left = before
  local made = {}
  local wanting = true
  if s.era or not t then left, made, wanting = taken(runs, p, before, in_line) end
  local ended = overdue(k, s, p, wanting, runs)
  if ended then left = before end
  if t and s.era and changed then
    call('SET', k.tokens, format('%d', left), 'KEEPTTL')
  elseif left < before then
    call('DECRBY', k.tokens, format('%d', before - left))
  end
  local till = 0
  local taken_from = p and p.kind == TEMPLATE and left < p.capacity -- a budget's expiry doesn't depend on what is taken
  if t and s.era and p.expires and (taken_from or changed or #runs == 0) then
    till = keep(k, t, s, p, before, hold_s, changed)
  end
  if ended then return say(11) end

  say(1, left, s.era or 0, s.index or 0, s.last or 0, till)
  local numbers = #reply + 1
  say(0)
  if p and (wanting or with_policy) then
    for word in string.gmatch(policy_text(s, p), '%d+') do say(word + 0) end
    reply[numbers] = #reply - numbers
  end
  local denied = 0
  for r, run in ipairs(runs) do
    local fit, wait = made[r] or 0, 0
    if fit < run.count then
      wait = s.era and wait_us(s, p, left, run.each + run.least, now) or -1
      -- Takes that could never be made don't count as denied.
      local want = run.n > 0 and (run.count - fit) * run.n or fit == 0 and run.count or 0
      if p and (run.n > 0 and run.n + run.least or run.count) <= p.capacity then denied = denied + want end
    end
    say(fit, wait)
  end
  if s.era then count_denied(k.ctl, p, denied) end
end

local templates = {}
for t = 1, number() do
  local template = {pol = arg(), most = number(), near = arg() == '1', known = schedule(arg())}
  if template.known then
    template.full = template.known.full
    template.steps = steps_of(policy(template.pol))
  end
  templates[t] = template
end
while arg_at < #ARGV do
  local t, k = templates[number()], {tokens = next_key(), ctl = next_key()}
  if t and t.known then
    k.instants = (schedule(arg()) or t.known).instants
    k.ended = arg() == '1'
  end
  local may_create = arg() == '1'
  if t then
    k.index = next_key()
    if may_create then k.override = next_key() end
    if t.near and not t.known then k.set = next_key() end
    if t.near then k.alive = next_key() end
  end
  local with_policy = arg() == '1'
  local in_line = arg() == '1'
  local hold_s = number()
  local runs = {}
  for r = 1, number() do
    local n = number()
    runs[r] = {n = n, each = max(1, n), count = number(), leave = arg(), least = 0}
  end
  takes(k, t, may_create, with_policy, in_line, hold_s, runs)
end
return unwritten(KEYS[2], reply) -- the reply may be a denial that wrote nothing
