-- refill: credit what is due to one or more buckets, each on its own, if the caller's (era, index) is the stored one.
--
-- KEYS  first K tokens, {K} index of every bucket, then {K}:ctl state of every bucket
--       then, if they are buckets of one template: a shard of its active set, and the count of its buckets alive. A bucket that
--       is full in the end leaves the shard, as does a name that is no bucket; none is created; and every few refills, an
--       eighth of its life at most, a bucket of which less than half its life is left gets a new expiry
-- ARGV  per bucket: 1 era, 2 index: what the caller last learned; 0 0 if nothing
--                   3 pol: the policy to put in force if its fence is newer (text as in state.lua); '-' for none, '' for
--                     that of the bucket before
--       then for each bucket that is unlike the others:
--                   1 its number, from 1
--                   2 create: 0 never, 1 if the caller remembers the bucket (as for the others, unless they are a
--                     template's), 2 also if it is new
--                   3 step_us, 4 next_us: stepped policies: the instant to credit and the one after it; 0 for none
-- Reply now_us, then per bucket 5 integers: status, tokens, and
--        0 as expected: applied, the index one more than the caller's, the policy the caller's: added, clamped, elapsed_us
--       -3 stale, -4 early, in the caller's era, under the caller's policy:                     index, last_us, 0
--       any other status:                                                                       added, clamped, elapsed_us
--       then for each of those with any other status, in order, 11 integers:
--       marks, era, index, last_us, epoch, seq, step_us, malformed_key, outstanding, due_us, debt; added includes what paid debt
-- status 1 applied     credited what was due
--        2 switched    the caller's index was old but its fence newer: credited under the old policy, then switched
--        3 stale       the caller's (era, index) is old; nothing written
--        4 early       under half an interval since the last refill; nothing written
--        5 foreign     somebody else moved the index: that stretch is not credited again
--        6 initialised created, or a foreign client's bucket adopted
--        7 unknown     no such bucket, and this call may not create it; nothing written
--        8 rolled back this server has lost a write that the caller saw: new era
--        9 clock       this server's clock stepped back: new era
--       10 malformed   key malformed_key of the three holds something else; nothing written
-- marks: 1 pol differs from the one in force under the same fence, and was ignored; and 2 the bucket is full, with no
-- reservation or lease, since those who refill end them. One as expected is full if it holds what pol says is its capacity.
--
-- Every call that writes adds one to the index. Credit is elapsed time on this server's clock, so any winner, however late
-- or however often sent, adds exactly what is due. Bucket.Refill in package policy states the same rules in Go.
--
-- Nearly every call meets buckets that are as the caller and the refill before left them, under a plain policy, with nothing
-- outstanding. Those are done first and with little: functions and tables cost more than the arithmetic. The others follow by
-- the complete rules.
local KEYS, ARGV, call, pcall, match, find, format = KEYS, ARGV, redis.call, redis.pcall, string.match, string.find, string.format
local n = math.floor(#KEYS / 3)
local shard, alive_key = KEYS[3 * n + 1], KEYS[3 * n + 2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local now_text = time[1] .. string.sub('00000' .. time[2], -6)

-- One read for all tokens and indexes; MGET answers nil for a key of another type.
local strings = call('MGET', unpack(KEYS, 1, 2 * n))

local reply = {now, 0, 0, 0, 0, 0} -- room for one bucket: a table that grows costs
local others, given -- numbers of the buckets that remain, and the policy given for each by its number
local aging, aging_policy -- numbers of a template's buckets whose expiry is to be looked at, and the policy of each by its number

-- The policy given for the bucket at hand; its numbers are nil unless it is plain: smooth, and without a grant.
local pol, capacity, rate, per, half, max_elapsed
local every -- after so many refills a template's bucket has its expiry looked at

for i = 1, n do
  local a, r, key_ctl, exp = 3 * i - 2, 5 * i - 4, KEYS[2 * n + i], ARGV[3 * i - 1]
  local held_text, stored = strings[2 * i - 1], strings[2 * i]
  if ARGV[a + 2] ~= '' then
    pol = ARGV[a + 2]
    capacity, rate, per, half, max_elapsed = match(pol, '^%d+ %d+ 0 (%d+) (%d+) (%d+) (%d+) (%d+) %d+ %d %d %d %d 0 0 0 %d$')
    if capacity then
      capacity, rate, per, max_elapsed = capacity + 0, rate + 0, per + 0, max_elapsed + 0
      every = shard and math.max(1, math.floor(math.max(60000000, 2 * capacity * per / rate) / (8 * half)))
      half = math.floor(half / 2)
    end
  end
  local ctl = capacity and held_text and stored and pcall('HMGET', key_ctl, 'st', 'pol', 'out')
  local done = false
  if ctl and ctl[1] and ctl[2] == pol and not ctl[3] then
    local index, last, carry, era, rest = match(ctl[1], '^(%d+) (%d+) (%d+) (%d+) (%d+ %d+)$')
    local held = tonumber(held_text)
    local elapsed = last and now - last
    if index == stored and era == ARGV[a] and held and held >= 0 and held <= capacity and elapsed >= 0 then
      if index ~= exp or elapsed < half then
        done = (index == exp or index + 0 > exp + 0) and (held_text == '0' or find(held_text, '^[1-9]%d*$'))
        if done then
          reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = index == exp and -4 or -3, held, index + 0, last + 0, 0
        end
      else
        local units = (elapsed < max_elapsed and elapsed or max_elapsed) * rate + carry
        carry = units % per
        local add, clamped = (units - carry) / per, 0
        if held + add >= capacity then
          clamped = held + add - capacity
          add, carry = capacity - held, 0
        end
        -- INCRBY refuses what tonumber takes for a number and is none, before anything is written.
        if add > 0 then
          done = pcall('INCRBY', KEYS[2 * i - 1], add) == held + add
        else
          done = held_text == '0' or find(held_text, '^[1-9]%d*$')
        end
        if done then
          call('INCR', KEYS[2 * i])
          call('HSET', key_ctl, 'st', format('%.0f %s %.0f %s %s', exp + 1, now_text, carry, era, rest))
          if shard then
            if held + add >= capacity then
              pcall('SREM', shard, KEYS[2 * i - 1])
            elseif (exp + 1) % every == 0 then
              aging, aging_policy = aging or {}, aging_policy or {}
              aging[#aging + 1], aging_policy[i] = i, {capacity = capacity, tokens = rate, per = per}
            end
          end
          reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = 0, held + add, add, clamped, elapsed
        end
      end
    end
  end
  if not done then
    others, given = others or {}, given or {}
    others[#others + 1], given[i] = i, pol
  end
end
if not others and not aging then return reply end

-- The complete rules.
--#include state
--#include expiry

-- age gives bucket i of a template, under policy p, a new expiry if less than half its life is left.
local function age(i, p)
  local was, till = arm({KEYS[2 * i - 1], KEYS[2 * i], KEYS[2 * n + i]}, p, now, ttl_s(p) / 2)
  count(alive_key, was, till, now)
  outlast(shard, till)
end
for _, i in ipairs(aging or {}) do age(i, aging_policy[i]) end
if not others then return reply end

local policies = {}
local function policy_of(text)
  local p = policies[text]
  if p == nil then
    p = policy(text) or false
    policies[text] = p
  end
  return p
end

local function text(x) return format('%.0f', x) end

-- What is unlike the others, by the bucket's number.
local create_of, step_of, next_of = {}, {}, {}
for a = 3 * n + 1, #ARGV, 4 do
  local i = tonumber(ARGV[a])
  create_of[i], step_of[i], next_of[i] = ARGV[a + 1], tonumber(ARGV[a + 2]), math.max(0, tonumber(ARGV[a + 3]))
end

-- The bucket at hand: its keys, what the caller gives for it, its state as read and as it will be written, and the answer about it.
local key_tokens, key_index, key_ctl
local known, exp, create, pol_given, step_given, next_given
local index, last, carry, era, step, next_
local rest -- the text of era, step and next in the state, while they are unchanged
local conflict, added, clamped, elapsed, fence_epoch, fence_seq, stepped, bad_key
local in_force -- the policy in force, nil if none is
local out = {} -- what the bucket's field out says, as fields of a state

-- wrong_key is the first of the bucket's keys that is there with another type.
local function wrong_key()
  for i, key in ipairs({key_tokens, key_index, key_ctl}) do
    local kind = redis.call('TYPE', key).ok
    if kind ~= 'none' and kind ~= (i < 3 and 'string' or 'hash') then return i end
  end
  return 0
end

local function state_text()
  return format('%.0f %s %.0f %s', index, last == now and now_text or text(last), carry, rest or format('%.0f %.0f %.0f', era, step, next_))
end

-- initialise creates, adopts or declines a bucket without state; it returns status and tokens.
local function initialise(held, stored)
  local p = pol_given and policy_of(pol_given)
  if not p then return 7, 0 end
  local tokens
  if held or stored then
    tokens = math.min(held or 0, p.capacity)
  elseif known > 0 and create ~= '0' then
    tokens = p.on_loss == 1 and p.capacity or 0
  elseif known == 0 and create == '2' then
    tokens = p.initial
  else
    return 7, 0
  end
  era, index = math.max(now, known + 1), math.max(stored or 0, exp) + 1
  last, carry, step, next_, rest = now, 0, now, next_given, nil
  in_force, fence_epoch, fence_seq, stepped = p, p.epoch, p.seq, p.stepped
  redis.call('SET', key_tokens, text(tokens), 'KEEPTTL')
  redis.call('SET', key_index, text(index), 'KEEPTTL')
  redis.call('HSET', key_ctl, 'st', state_text(), 'pol', pol_given)
  return 6, tokens
end

-- settle credits the stretch since the last refill under the policy in force: debt first, then tokens. It returns the tokens then held.
local function settle(p, tokens, step_due)
  elapsed = now - last
  if elapsed < 0 then elapsed = 0 end
  local add = 0
  if not p.stepped then
    local el, units = elapsed, nil
    if el > p.max_elapsed then el = p.max_elapsed end
    if p.grant_era ~= era then
      units = el * p.tokens + carry
    else
      local granted = math.min(el, math.max(0, p.grant_end - (now - el)))
      units = (el - granted) * p.tokens + granted * p.grant_tokens + carry
    end
    carry = units % p.per
    add = (units - carry) / p.per
  elseif step_due then
    add = p.tokens
  end
  local paid = math.min(add, out.debt)
  out.debt = out.debt - paid
  add = add - paid
  local after, most = tokens + add, room(out, p)
  if after >= most then
    clamped = math.min(after - most, add)
    after = most
    carry = 0
  end
  added = paid
  if after > tokens then added = paid + after - tokens end
  return after
end

-- change carries tokens and credit over from policy p to q and returns the tokens then held.
local function change(p, q, tokens)
  if q.kind ~= p.kind then
    carry, step, next_ = 0, math.max(step, now), 0
  elseif q.per ~= p.per then
    carry = math.max(0, math.floor(carry / p.per * q.per) - 1)
  end
  if q.carry_over == 1 then
    if q.capacity < p.capacity and tokens > 0 then
      tokens = math.min(tokens, math.floor(tokens / p.capacity * q.capacity))
    end
  elseif q.carry_over == 2 then
    tokens = math.min(tokens, 0)
    carry = 0
  end
  return tokens
end

-- refill settles one bucket. It returns status and tokens.
local function refill(held, stored)
  held, stored = integer(held), integer(stored)
  if held == false then bad_key = 1 return 10, 0 end
  if stored == false then bad_key = 2 return 10, 0 end
  local ctl = redis.pcall('HMGET', key_ctl, 'st', 'pol', 'out')
  if ctl.err then
    wrong_type(ctl)
    bad_key = 3
    return 10, 0
  end
  local st, pol = ctl[1], ctl[2]
  if not st or not held or not stored then
    bad_key = wrong_key()
    if bad_key > 0 then return 10, 0 end
    if not st and not pol then return initialise(held, stored) end
  end
  local p = pol and policy_of(pol)
  index, last, carry, rest = string.match(st or '', '^(%d+) (%d+) (%d+) (%d+ %d+ %d+)$')
  if not rest or not p then
    index, last, bad_key = 0, 0, 3
    return 10, 0
  end
  index, last, carry = tonumber(index), tonumber(last), tonumber(carry)
  era, step, next_ = string.match(rest, '(%d+) (%d+) (%d+)')
  era, step, next_ = tonumber(era), tonumber(step), tonumber(next_)
  if ctl[3] then
    local o, due, debt = string.match(ctl[3], OUT)
    if not o then
      index, last, era, step, bad_key = 0, 0, 0, 0, 3
      return 10, 0
    end
    out.out, out.due, out.debt = tonumber(o), tonumber(due), tonumber(debt)
  end
  local debt = out.debt

  local q, switch = nil, false
  if pol_given and pol_given ~= pol then
    q = policy_of(pol_given)
    switch = q and (q.epoch > p.epoch or (q.epoch == p.epoch and q.seq > p.seq))
    if q and not switch and q.epoch == p.epoch and q.seq == p.seq then conflict = 1 end
  end
  local current, copy = stored or index, index
  local tokens = held or (p.on_loss == 1 and p.capacity or 0)
  fence_epoch, fence_seq, stepped, index = p.epoch, p.seq, p.stepped, current

  local status = 1
  if known > era or (known == era and exp > current) then
    status = 8
    tokens = p.on_rollback == 1 and math.min(tokens, p.capacity) or 0
    current = math.max(current, exp)
    carry = 0
    if last < now or now < last - TOLERANCE_US then last = now end
    rest = nil
    era = math.max(now, 1 + math.max(era, known))
  elseif now < last - TOLERANCE_US then
    status = 9
    last, rest = now, nil
    era = math.max(now, 1 + math.max(era, known))
  else
    local stale = known < era or exp < current
    if stale and not switch then return 3, tokens end
    local step_due = false
    if p.stepped then
      step_due = step < step_given and step_given <= now
    end
    if not switch and not step_due and now - last < p.half then return 4, tokens end
    if stale then status = 2 end
    if current ~= copy then
      status = 5
      carry = 0
    else
      tokens = settle(p, tokens, step_due)
    end
    if step_due then step, next_ = step_given, next_given end
    if last < now then last = now end
  end
  if switch then
    tokens = change(p, q, tokens)
    p, rest = q, nil
    fence_epoch, fence_seq, stepped = p.epoch, p.seq, p.stepped
  end
  in_force = p
  tokens = math.min(tokens, room(out, p)) -- a foreign client may have left more
  if p.stepped then
    rest = nil
    if next_ <= step then next_ = next_given end
  end
  index = (current > copy and current or copy) + 1

  -- INCRBY keeps a key's expiry.
  if tokens ~= held then redis.call('INCRBY', key_tokens, text(tokens - (held or 0))) end
  if stored == index - 1 then
    redis.call('INCR', key_index)
  else
    redis.call('INCRBY', key_index, text(index - (stored or 0)))
  end
  if switch then
    redis.call('HSET', key_ctl, 'st', state_text(), 'pol', pol_given)
  else
    redis.call('HSET', key_ctl, 'st', state_text())
  end
  if out.debt ~= debt then put_out(key_ctl, out) end
  if added > 0 and p.grant_end > 0 then redis.pcall('HINCRBY', key_ctl, 'added', text(added)) end
  return status, tokens
end

local d = 5 * n + 1 -- where the details of the next bucket begin, less one
for _, i in ipairs(others) do
  key_tokens, key_index, key_ctl = KEYS[2 * i - 1], KEYS[2 * i], KEYS[2 * n + i]
  known, exp, pol_given = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), given[i] ~= '-' and given[i]
  create, step_given, next_given = create_of[i] or (shard and '0' or '1'), step_of[i] or 0, next_of[i] or 0
  era, index, last, step, stepped = 0, 0, 0, 0, false
  conflict, added, clamped, elapsed, fence_epoch, fence_seq, bad_key = 0, 0, 0, 0, 0, 0, 0
  in_force, out.out, out.due, out.debt = nil, 0, 0, 0
  local r, status, tokens = 5 * i - 4, refill(strings[2 * i - 1], strings[2 * i])
  local full = in_force and tokens >= in_force.capacity and out.due == 0
  if shard then
    if full or status == 7 or status == 10 then
      redis.pcall('SREM', shard, key_tokens)
    elseif in_force then
      age(i, in_force)
    end
  end
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = status, tokens, added, clamped, elapsed
  reply[d + 1], reply[d + 2], reply[d + 3], reply[d + 4] = conflict + (full and 2 or 0), era, index, last
  reply[d + 5], reply[d + 6], reply[d + 7], reply[d + 8] = fence_epoch, fence_seq, stepped and step or 0, bad_key
  reply[d + 9], reply[d + 10], reply[d + 11] = out.out, out.due, out.debt
  d = d + 11
end
return reply
