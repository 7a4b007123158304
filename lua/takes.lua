-- takes: takes from several buckets in one call, several amounts of each one after the other, each take all or nothing.
--
-- KEYS  first K of the buckets that are asked on K alone, each once
--       then of each bucket that is asked whole: K, {K}:ctl; and if it is of a refilled template: {K}, {K}:limit; and, where its
--       template says so: the shard of the active set that it belongs to, the count of the template's buckets alive
-- ARGV  how many buckets are asked on K alone; of each: the tokens of all its takes together
--       how many bounds follow; of each: from which bucket on, from 1, it counts; leave: tokens that must be left; below: how many
--       the bucket must hold fewer than, -1 for no bound. Without one: 0, -1
--       how many templates follow; of each: pol (text as in state.lua); most: buckets alive at once, 0 for no bound; near: 1 if
--       the set and the count share a slot with the buckets
--       of each bucket that is asked whole:
--         template: its number, from 1; 0 for none
--         create: 1 if a bucket of the template that is missing is created
--         tell: 1 to be told the policy also if all takes fit
--         in_line: 1 if no take may overtake another: none is made behind one that doesn't fit
--         hold_s: the bucket is opened for another script, which holds tokens for so long: it outlives that, and what is
--           remembered of it afterwards; 0 otherwise
--         how many runs follow, 0 to open the bucket only; of each: n, count: so many takes of n tokens each, or, if n is 0, one
--           of as many as there are, up to count; leave: the tokens that must be left, or a percentage of the capacity, as in 20%
-- Reply integers. Of each bucket on K alone: the tokens left, all is taken; or -1: nothing is taken, since not all fits, or the
--       bucket is missing, holds something else, or as many tokens as below: ask it whole
--       then, if any is asked whole, now_us, and of each:
--         1, left, era, index, last_us, enter, was_s, till_s, numbers, pol..., per run taken, wait_us: pol is so many numbers, in the
--            order of the text, 0 if there is no policy or it is not told; wait_us until n tokens and those to be left are
--            due, 0 if all takes of the run were made, -1 if never or unknown
--            enter 1: the caller is to enter the bucket in the active set; was_s, till_s: the bucket's expiry moved from one instant to
--            the other, 0 for none, or is the same: the caller is to count that. Only where the template isn't near
--         2: no such bucket; nothing is created
--         3, k: key k of K, {K}, {K}:ctl holds something else
--         9, alive: the bucket is new, and as many as most or more are alive; nothing is created
--
-- The same takes sent one by one have the same answers. A take on K alone costs one command. A bucket that isn't full is in the active
-- set of its template: whoever takes from a full one, creates one, or finds one that should be in the set and isn't, puts it there, and sets its last refill to now,
-- since a full bucket is owed nothing.
local KEYS, ARGV, call, pcall = KEYS, ARGV, redis.call, redis.pcall
local reply, alone = {}, tonumber(ARGV[1])
local bound, leave, below = alone + 3, 0, -1
local bounds_end = bound + 3 * ARGV[alone + 2]
local from = bound < bounds_end and tonumber(ARGV[bound])

-- DECRBY makes a key that is missing, so it is only tried on those that are there.
local there = alone == 0 or call('EXISTS', unpack(KEYS, 1, alone)) == alone
for i = 1, alone do
  if i == from then
    leave, below = tonumber(ARGV[bound + 1]), tonumber(ARGV[bound + 2])
    bound = bound + 3
    from = bound < bounds_end and tonumber(ARGV[bound])
  end
  local key, total, left = KEYS[i], ARGV[i + 1], -1
  if there or call('EXISTS', key) == 1 then
    left = pcall('DECRBY', key, total)
    if type(left) == 'table' then
      -- Every other error comes with the first write, before anything is taken.
      if not string.find(left.err, 'WRONGTYPE', 1, true) and not string.find(left.err, 'not an integer', 1, true) then return left end
      left = -1
    elseif left < leave or (below >= 0 and left + total >= below) then
      call('INCRBY', key, total)
      left = -1
    end
  end
  reply[i] = left
end
if #KEYS == alone then return reply end

--#include state
--#include leave
--#include expiry
local HELD_S = 150 -- a settlement is remembered for a minute, what outlives it lasts one longer; and some for the way
local now = now_us()
local arg_at, key_at = bounds_end - 1, alone
local function arg()
  arg_at = arg_at + 1
  return ARGV[arg_at]
end
local function number() return tonumber(arg()) end
local function next_key()
  key_at = key_at + 1
  return KEYS[key_at]
end
local function put(...)
  for i = 1, select('#', ...) do reply[#reply + 1] = (select(i, ...)) end
end

-- taken makes takes of tokens and returns how many are left, and per run how many takes were made. All fit if none is wanting.
local function taken(runs, p, tokens, in_line)
  local made, wanting, closed = {}, false, false
  for r, run in ipairs(runs) do
    run.least = least(run.leave, p and p.capacity or 0)
    -- Tokens only fall, so the takes of a run that fit are its first ones.
    local fit = closed and 0 or math.max(0, math.min(run.count, math.floor((tokens - run.least) / run.each)))
    made[r], tokens = fit, tokens - fit * run.each
    wanting = wanting or fit < run.count
    closed = closed or in_line and fit < run.count
  end
  return tokens, made, wanting
end

-- create makes a template's bucket that is missing, or adopts a foreign client's, and returns its state, policy, tokens; or the
-- reply that says why not.
local function create(k, t, runs, tokens, index)
  local pol = redis.pcall('GET', k.limit)
  local p = type(pol) == 'string' and policy(pol)
  if not p then
    pol = t.pol
    p = policy(pol)
  end
  -- An empty key alone is what a plain client's fetch leaves where no bucket is.
  if not index and (tokens or 0) == 0 then
    local needed = #runs == 0
    for _, run in ipairs(runs) do needed = needed or run.each <= p.capacity end
    local n = needed and k.alive and t.most > 0 and alive(k.alive, now) or 0
    if n >= t.most and n > 0 then return nil, {9, n} end
    tokens = p.initial
    if not needed then return nil, nil, p, tokens, pol end
  end
  tokens = math.max(0, math.min(tokens or 0, p.capacity))
  local s = {era = now, index = (index or 0) + 1, last = now, carry = 0, step = 0, next = 0, out = 0, due = 0, debt = 0}
  redis.call('SET', k.tokens, string.format('%.0f', tokens))
  redis.call('SET', k.index, string.format('%.0f', s.index))
  redis.call('HSET', k.ctl, 'st', format_state(s), 'pol', pol)
  return s, nil, p, tokens, pol
end

-- keep sees to it that a template's bucket that isn't full, or is to be opened, is in the active set and has its expiry. before are the tokens that it
-- held, new that it was created by this call.
local function keep(k, s, p, before, hold_s)
  local was, till = arm({k.tokens, k.index, k.ctl}, p, now, 0.75 * ttl_s(p), hold_s > 0 and hold_s + HELD_S)
  local entered
  if k.set then
    entered = enter_set(k.set, k.tokens, till) == 1
    count(k.alive, was, till, now)
  end
  if (entered or before >= p.capacity) and s.last < now then
    s.last, s.carry = now, 0
    redis.call('HSET', k.ctl, 'st', format_state(s))
  end
  return k.set and 0 or 1, was, till
end

local function whole(k, t, may_create, tell, in_line, hold_s, runs)
  local tokens = get(k.tokens)
  if tokens == false then return put(3, 1) end
  local s, p, pol = read_ctl(k.ctl)
  if s == false then return put(3, 3) end
  local new = not s
  if not s and t then
    if not may_create then return put(2) end
    local index, why = get(k.index), nil
    if index == false then return put(3, 2) end
    s, why, p, tokens, pol = create(k, t, runs, tokens, index)
    if why then return put(unpack(why)) end
  end
  if not tokens and not p then return put(2) end
  local before = tokens or 0
  local left, made, wanting = before, {}, true
  if s or not t then left, made, wanting = taken(runs, p, before, in_line) end
  if left < before then redis.call('DECRBY', k.tokens, string.format('%.0f', before - left)) end
  local enter, was, till = 0, 0, 0
  if s and t and (left < p.capacity or new or #runs == 0) then enter, was, till = keep(k, s, p, before, hold_s) end

  put(1, left, s and s.era or 0, s and s.index or 0, s and s.last or 0, enter, was, till)
  local numbers = #reply + 1
  put(0)
  if p and (wanting or tell) then
    for word in string.gmatch(s and told(s, p, pol) or pol, '%d+') do put(tonumber(word)) end
    reply[numbers] = #reply - numbers
  end
  local denied = 0
  for r, run in ipairs(runs) do
    local fit, wait = made[r] or 0, 0
    if fit < run.count then
      wait = s and wait_us(s, p, left, run.each + run.least, now) or -1
      -- One that could never be made wants no more of a pool.
      if run.n == 0 and fit == 0 and s and run.count <= p.capacity then denied = denied + run.count end
      if run.n > 0 and s and run.n + run.least <= p.capacity then denied = denied + (run.count - fit) * run.n end
    end
    put(fit, wait)
  end
  if denied > 0 and p.counts_denied then redis.pcall('HINCRBY', k.ctl, 'denied', string.format('%.0f', denied)) end
end

local templates = {}
for t = 1, number() do templates[t] = {pol = arg(), most = number(), near = arg() == '1'} end
put(now)
while arg_at < #ARGV do
  local t, k = templates[number()], {tokens = next_key(), ctl = next_key()}
  if t then
    k.index, k.limit = next_key(), next_key()
    if t.near then k.set, k.alive = next_key(), next_key() end
  end
  local may_create, tell, in_line, hold_s, runs = arg() == '1', arg() == '1', arg() == '1', number(), {}
  for r = 1, number() do
    local n = number()
    runs[r] = {n = n, each = math.max(1, n), count = number(), leave = arg()}
  end
  whole(k, t, may_create, tell, in_line, hold_s, runs)
end
-- A denial writes nothing, and counts for nothing on a server that may not write, such as an old master. This deletes nothing, and
-- is refused there.
local deleted = pcall('HDEL', KEYS[alone + 2], '')
if type(deleted) == 'table' and string.find(deleted.err, 'READONLY', 1, true) then return deleted end
return reply
