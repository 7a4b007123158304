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
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/credit
--#include shared/switch
--#include shared/steps
--#include shared/denial
--#include shared/leave
--#include shared/expiry
--#include shared/unwritten
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
