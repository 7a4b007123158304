-- refill: credit what is due to one or more buckets, each on its own, if the caller's (era, index) is the stored one.
--
-- KEYS  first K tokens, {K} index of every bucket, then {K}:ctl state of every bucket
--       then, if they are buckets of one template: a shard of its active set, and the count of its buckets alive. A bucket that
--       is full in the end leaves the shard, as does a name that is no bucket; none is created; and every few refills, an
--       eighth of its life at most, a bucket of which less than half its life is left gets a new expiry
-- ARGV  per bucket: what the caller last learned, as in ' era#mark index', with the mark of the policy given; '0 0' if nothing
--       then how many policies follow, and of each:
--                   1 the number, from 1, of the first bucket that it is given for: it is for those up to the next policy's
--                   2 pol: the policy to put in force if its fence is newer (text as in state.lua); '-' for none
--                   3 mark: letters and digits made of pol, others for other policies
--       then for each bucket that is unlike the others:
--                   1 its number, from 1
--                   2 create: 0 never, 1 if the caller remembers the bucket (as for the others, unless they are a
--                     template's), 2 also if it is new
--                   3 step_us, 4 next_us: stepped policies: the instant to credit and the one after it; 0 for none
-- Reply now_us, then per bucket integers, by the first of them:
--        0 or more, the tokens. As expected: applied, the index one more than the caller's, the policy the caller's; added and
--           elapsed_us are those last told by a -6, which comes before a bucket of which they are others:
--       -6 added, elapsed_us, and then the tokens
--       -1 as expected, but not all had room:                                                  tokens, added, clamped, elapsed_us
--       -2 stale, and the caller knew nothing, under the caller's policy:                      tokens, era, index, last_us
--       -3 stale, in the caller's era, under the caller's policy:                              tokens, index, last_us
--       -4 early, the index and the policy the caller's:                                       tokens, last_us
--       -5 anything else: see below
--       then for each of those with -5, in order, 16 integers: status, tokens, added, clamped, elapsed_us,
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
-- Nearly every call meets buckets that are as the caller and the refill before left them, or that the caller sees for the first
-- time, under a plain policy, with nothing outstanding. Those are done first and with little: functions, tables, arguments and
-- numbers in the reply cost more than the arithmetic. The others follow by the complete rules.
local KEYS, ARGV, call, pcall, tonumber = KEYS, ARGV, redis.call, redis.pcall, tonumber
local match, find, format, sub = string.match, string.find, string.format, string.sub
local n = math.floor(#KEYS / 3)
local VERSION = '^ ?(%-?%d+)#?%w* (%-?%d+)$'
local shard, alive_key = KEYS[3 * n + 1], KEYS[3 * n + 2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local now_text = time[1] .. (#time[2] == 6 and time[2] or sub('00000' .. time[2], -6))

-- One read for all tokens and indexes; MGET answers nil for a key of another type.
local strings = call('MGET', unpack(KEYS, 1, 2 * n))

local reply, r = {now, 0, 0, 0}, 1 -- room for one bucket: a table that grows costs
local others, given -- numbers of the buckets that remain, and the policy given for each by its number
local aging, aging_policy -- numbers of a template's buckets whose expiry is to be looked at, and the policy of each by its number

-- The policy given for the bucket at hand; its numbers are nil unless it is plain: smooth, and without a grant.
local pol, mark, capacity, rate, per, half, max_elapsed
local every -- after so many refills a template's bucket has its expiry looked at
local next_pol, begins = n + 2, 1 -- where the next policy is, and for which bucket it is the first time

-- What neighbours often have in common: the text of their tokens, and its number; the last refill, with a space on either side,
-- how long ago it was, and the credit since then but for their carries; and what was last told by a -6.
local held_text, held
local last_text, elapsed, earned
local told_added, told_elapsed
local texts = {} -- the numbers that were added, as text

local STATE = '^(%d+)( %d+ )(%d+)( (%d+)[ %d]*)' -- index, last, carry, the rest, era
local UNMARKED, OTHERWISE_MARKED = '^%d+ %d+ %d+ %d+[ %d]*$', '^%d+ %d+ %d+ %d+[ %d]*#%w+$'
local SMALL = 2147483648 -- below it %d is exact wherever this runs, and costs half of %.0f
local state_now = '%d ' .. now_text .. ' %d' -- index, last, carry

for i = 1, n do
  if i == begins then
    pol, mark = ARGV[next_pol + 1], '#' .. ARGV[next_pol + 2]
    next_pol = next_pol + 3
    begins = next_pol < n + 2 + 3 * ARGV[n + 1] and tonumber(ARGV[next_pol])
    local more -- after initial: choices, and then a grant, unless it is none, and strict
    capacity, rate, per, half, max_elapsed, more = match(pol, '^%d+ %d+ 0 (%d+) (%d+) (%d+) (%d+) (%d+) %d+([ %d]*)$')
    if capacity and not (more == '' or find(more, '^ ?%d? ?%d? ?%d? ?%d?$') or find(more, '^ %d %d %d %d 0 0 0 %d$')) then capacity = nil end
    if capacity then
      capacity, rate, per, max_elapsed = capacity + 0, rate + 0, per + 0, max_elapsed + 0
      every = shard and math.max(1, math.floor(math.max(60000000, 2 * capacity * per / rate) / (8 * half)))
      half = math.floor(half / 2)
      last_text = nil
    end
  end
  local key, key_ctl, index_text, version, done = KEYS[2 * i - 1], KEYS[2 * n + i], strings[2 * i], ARGV[i], false
  if strings[2 * i - 1] ~= held_text then
    held_text = strings[2 * i - 1]
    held = held_text and tonumber(held_text)
  end
  local st = capacity and held and held >= 0 and held <= capacity and index_text and pcall('HGET', key_ctl, 'st')
  if st and not st.err then
    -- The caller knows how the state of a bucket that is as it left it begins and ends: it takes no pattern to read what is
    -- between, an instant of 16 digits and the carry.
    local index, era = index_text, nil
    local digits, ends = #index_text, #version - #index_text - 1
    local rest = sub(st, -ends)
    local last, carry
    local expected = rest .. ' ' .. index_text == version and sub(st, 1, digits) == index_text
    if expected then
      last, carry = sub(st, digits + 1, digits + 18), match(st, '^%d+', digits + 19)
      expected = carry and digits + 18 + #carry + ends == #st and (last == last_text or find(last, '^ %d+ $'))
    end
    if not expected then
      index, last, carry, rest, era = match(st, STATE .. mark .. '$')
      if not index then
        local fields = call('HMGET', key_ctl, 'pol', 'out')
        if fields[1] == pol and not fields[2] and (find(st, UNMARKED) or find(st, OTHERWISE_MARKED)) then
          index, last, carry, rest, era = match(st, STATE)
        end
      end
      if index then
        rest = rest .. mark
        expected = version == ' ' .. era .. mark .. ' ' .. index
      end
    end
    if index == index_text then
      if last ~= last_text then
        last_text, elapsed = last, now - last
        earned = (elapsed < max_elapsed and elapsed or max_elapsed) * rate
      end
      if expected and elapsed >= half then
        local units = earned + carry
        carry = units % per
        local add, clamped = (units - carry) / per, 0
        local tokens = held + add
        if tokens >= capacity then
          clamped, tokens = tokens - capacity, capacity
          add, carry = capacity - held, 0
        end
        -- INCRBY refuses what tonumber takes for a number and is none, before anything is written.
        if add > 0 then
          local text = texts[add]
          if not text then
            text = format(add < SMALL and '%d' or '%.0f', add)
            texts[add] = text
          end
          done = pcall('INCRBY', key, text) == tokens
        else
          done = held_text == '0' or find(held_text, '^[1-9]%d*$')
        end
        if done then
          index = call('INCR', KEYS[2 * i])
          call('HSET', key_ctl, 'st', format(index < SMALL and carry < SMALL and state_now or '%.0f ' .. now_text .. ' %.0f', index, carry) .. rest)
          if shard then
            if tokens >= capacity then
              pcall('SREM', shard, key)
            elseif index % every == 0 then
              aging, aging_policy = aging or {}, aging_policy or {}
              aging[#aging + 1], aging_policy[i] = i, {capacity = capacity, tokens = rate, per = per}
            end
          end
          if clamped ~= 0 then
            reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = -1, tokens, add, clamped, elapsed
            r = r + 5
          elseif add == told_added and elapsed == told_elapsed then
            r = r + 1
            reply[r] = tokens
          else
            told_added, told_elapsed = add, elapsed
            reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = -6, add, elapsed, tokens
            r = r + 4
          end
        end
      elseif elapsed >= 0 and (held_text == '0' or find(held_text, '^[1-9]%d*$')) then
        local known, exp = match(version, VERSION)
        era = era or known
        if version == '0 0' then
          reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = -2, held, era + 0, index + 0, last + 0
          r, done = r + 5, true
        elseif known == era and index == exp then
          reply[r + 1], reply[r + 2], reply[r + 3] = -4, held, last + 0
          r, done = r + 3, true
        elseif known == era and index + 0 > exp + 0 then
          reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = -3, held, index + 0, last + 0
          r, done = r + 4, true
        end
      end
    end
  end
  if not done then
    others, given = others or {}, given or {}
    others[#others + 1], given[i] = i, pol
    r = r + 1
    reply[r] = -5
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
for a = n + 2 + 3 * ARGV[n + 1], #ARGV, 4 do
  local i = tonumber(ARGV[a])
  create_of[i], step_of[i], next_of[i] = ARGV[a + 1], tonumber(ARGV[a + 2]), math.max(0, tonumber(ARGV[a + 3]))
end

-- The bucket at hand: its keys, what the caller gives for it, its state as read and as it will be written, and the answer about it.
local key_tokens, key_index, key_ctl
local known, exp, create, pol_given, step_given, next_given
local index, last, carry, era, step, next_
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
  return format_state({index = index, last = last, carry = carry, era = era, step = step, next = next_})
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
  last, carry, step, next_ = now, 0, now, next_given
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
  local s = state(st, ctl[3])
  if not s or not p then
    bad_key = 3
    return 10, 0
  end
  index, last, carry, era, step, next_ = s.index, s.last, s.carry, s.era, s.step, s.next
  out.out, out.due, out.debt = s.out, s.due, s.debt

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
    era = math.max(now, 1 + math.max(era, known))
  elseif now < last - TOLERANCE_US then
    status = 9
    last = now
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
    p = q
    fence_epoch, fence_seq, stepped = p.epoch, p.seq, p.stepped
  end
  in_force = p
  tokens = math.min(tokens, room(out, p)) -- a foreign client may have left more
  if p.stepped and next_ <= step then next_ = next_given end
  index = (current > copy and current or copy) + 1

  -- INCRBY keeps a key's expiry.
  if tokens ~= held then redis.call('INCRBY', key_tokens, text(tokens - (held or 0))) end
  if stored == index - 1 then
    redis.call('INCR', key_index)
  else
    redis.call('INCRBY', key_index, text(index - (stored or 0)))
  end
  redis.call('HSET', key_ctl, 'st', state_text())
  if switch then redis.call('HSET', key_ctl, 'pol', pol_given) end
  if out.debt ~= s.debt then put_out(key_ctl, out) end
  if added > 0 and p.grant_end > 0 then redis.pcall('HINCRBY', key_ctl, 'added', text(added)) end
  return status, tokens
end

for _, i in ipairs(others) do
  key_tokens, key_index, key_ctl = KEYS[2 * i - 1], KEYS[2 * i], KEYS[2 * n + i]
  known, exp = match(ARGV[i], VERSION)
  known, exp, pol_given = tonumber(known), tonumber(exp), given[i] ~= '-' and given[i]
  create, step_given, next_given = create_of[i] or (shard and '0' or '1'), step_of[i] or 0, next_of[i] or 0
  era, index, last, step, stepped = 0, 0, 0, 0, false
  conflict, added, clamped, elapsed, fence_epoch, fence_seq, bad_key = 0, 0, 0, 0, 0, 0, 0
  in_force, out.out, out.due, out.debt = nil, 0, 0, 0
  local status, tokens = refill(strings[2 * i - 1], strings[2 * i])
  local full = in_force and tokens >= in_force.capacity and out.due == 0
  if shard then
    if full or status == 7 or status == 10 then
      redis.pcall('SREM', shard, key_tokens)
    elseif in_force then
      age(i, in_force)
    end
  end
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5] = status, tokens, added, clamped, elapsed
  reply[r + 6], reply[r + 7], reply[r + 8], reply[r + 9] = conflict + (full and 2 or 0), era, index, last
  reply[r + 10], reply[r + 11], reply[r + 12], reply[r + 13] = fence_epoch, fence_seq, stepped and step or 0, bad_key
  reply[r + 14], reply[r + 15], reply[r + 16] = out.out, out.due, out.debt
  r = r + 16
end
return reply
