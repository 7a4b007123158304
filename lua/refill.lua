-- refill: credit what is due to one or more buckets, each on its own, if the caller's (era, index) is the stored one.
--
-- KEYS  first K tokens, {K} index of every bucket, then {K}:ctl state of every bucket
-- ARGV  per bucket: 1 era, 2 index: what the caller last learned; 0 0 if nothing
--                   3 create: 0 never, 1 if the caller remembers the bucket, 2 also if it is new
--                   4 pol: the policy to put in force if its fence is newer (text as in state.lua); '' for none
--                   5 step_us, 6 next_us: stepped policies: the instant to credit and the one after it; 0 for none
-- Reply per bucket, one after the other in one list, 14 integers:
--       status, conflict, era, index, now_us, last_us, tokens, added, clamped, elapsed_us, epoch, seq, step_us, malformed_key
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
-- conflict 1: pol differs from the one in force under the same fence; it was ignored.
--
-- Every call that writes adds one to the index. Credit is elapsed time on this server's clock, so any winner, however late
-- or however often sent, adds exactly what is due. Bucket.Refill in package policy states the same rules in Go.
--#include state
local now = now_us()
local n = #KEYS / 3

-- One read for all tokens and indexes; MGET answers nil for a key of another type.
local strings = redis.call('MGET', unpack(KEYS, 1, 2 * n))

local policies, times_of = {}, {}
local function policy_of(text)
  local p = policies[text]
  if p == nil then
    p = policy(text) or false
    policies[text] = p
  end
  return p
end

local format = string.format
local function text(x) return format('%.0f', x) end

-- The bucket at hand: its keys, its state as read and as it will be written, and the answer about it.
local key_tokens, key_index, key_ctl
local index, last, carry, era, step, next_
local rest -- the text of era, step and next in the state, while they are unchanged
local conflict, added, clamped, elapsed, fence_epoch, fence_seq, bad_key

-- wrong_key is the first of the bucket's keys that is there with another type.
local function wrong_key()
  for i, key in ipairs({key_tokens, key_index, key_ctl}) do
    local kind = redis.call('TYPE', key).ok
    if kind ~= 'none' and kind ~= (i < 3 and 'string' or 'hash') then return i end
  end
  return 0
end

local now_text = text(now)
local function state_text()
  return format('%.0f %s %.0f %s', index, last == now and now_text or text(last), carry, rest or format('%.0f %.0f %.0f', era, step, next_))
end

-- initialise creates, adopts or declines a bucket without state; it returns status and tokens.
local function initialise(a, held, stored)
  local known, exp, create, pol = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), ARGV[a + 2], ARGV[a + 3]
  local p = pol ~= '' and policy_of(pol)
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
  last, carry, step, next_, rest = now, 0, now, math.max(0, tonumber(ARGV[a + 5])), nil
  fence_epoch, fence_seq = p.epoch, p.seq
  redis.call('SET', key_tokens, text(tokens), 'KEEPTTL')
  redis.call('SET', key_index, text(index), 'KEEPTTL')
  redis.call('HSET', key_ctl, 'st', state_text(), 'pol', pol)
  return 6, tokens
end

-- settle credits the stretch since the last refill under the policy in force and returns the tokens then held.
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
  local after = tokens + add
  if after >= p.capacity then
    clamped = math.min(after - p.capacity, add)
    after = p.capacity
    carry = 0
  end
  if after > tokens then added = after - tokens end
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

-- refill settles one bucket; a is where its arguments begin. It returns status and tokens.
local function refill(a, held, stored)
  held, stored = integer(held), integer(stored)
  if held == false then bad_key = 1 return 10, 0 end
  if stored == false then bad_key = 2 return 10, 0 end
  local ctl = redis.pcall('HMGET', key_ctl, 'st', 'pol')
  if ctl.err then
    wrong_type(ctl)
    bad_key = 3
    return 10, 0
  end
  local st, pol = ctl[1], ctl[2]
  if not st or not held or not stored then
    bad_key = wrong_key()
    if bad_key > 0 then return 10, 0 end
    if not st and not pol then return initialise(a, held, stored) end
  end
  local p = pol and policy_of(pol)
  index, last, carry, rest = string.match(st or '', '^(%d+) (%d+) (%d+) (%d+ %d+ %d+)$')
  if not rest or not p then
    index, last, bad_key = 0, 0, 3
    return 10, 0
  end
  index, last, carry = tonumber(index), tonumber(last), tonumber(carry)
  local times = times_of[rest]
  if not times then
    times = {string.match(rest, '(%d+) (%d+) (%d+)')}
    for k = 1, 3 do times[k] = tonumber(times[k]) end
    times_of[rest] = times
  end
  era, step, next_ = times[1], times[2], times[3]

  local known, exp, given = tonumber(ARGV[a]), tonumber(ARGV[a + 1]), ARGV[a + 3]
  local q, switch = nil, false
  if given ~= pol and given ~= '' then
    q = policy_of(given)
    switch = q and (q.epoch > p.epoch or (q.epoch == p.epoch and q.seq > p.seq))
    if q and not switch and q.epoch == p.epoch and q.seq == p.seq then conflict = 1 end
  end
  local current, copy = stored or index, index
  local tokens = held or (p.on_loss == 1 and p.capacity or 0)
  fence_epoch, fence_seq, index = p.epoch, p.seq, current

  local status = 1
  if known > era or (known == era and exp > current) then
    status = 8
    tokens = p.on_rollback == 1 and tokens or 0
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
      local due = tonumber(ARGV[a + 4])
      step_due = step < due and due <= now
    end
    if not switch and not step_due and now - last < p.half then return 4, tokens end
    if stale then status = 2 end
    if current ~= copy then
      status = 5
      carry = 0
    else
      tokens = settle(p, tokens, step_due)
    end
    if step_due then step, next_ = tonumber(ARGV[a + 4]), math.max(0, tonumber(ARGV[a + 5])) end
    if last < now then last = now end
  end
  if switch then
    tokens = change(p, q, tokens)
    p, rest = q, nil
    fence_epoch, fence_seq = p.epoch, p.seq
  end
  if tokens > p.capacity then tokens = p.capacity end -- a foreign client may have left more
  if p.stepped then
    rest = nil
    if next_ <= step then next_ = math.max(0, tonumber(ARGV[a + 5])) end
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
    redis.call('HSET', key_ctl, 'st', state_text(), 'pol', given)
  else
    redis.call('HSET', key_ctl, 'st', state_text())
  end
  if added > 0 and p.grant_end > 0 then redis.pcall('HINCRBY', key_ctl, 'added', text(added)) end
  return status, tokens
end

local reply, r = {}, 0
for i = 1, n do
  key_tokens, key_index, key_ctl = KEYS[2 * i - 1], KEYS[2 * i], KEYS[2 * n + i]
  era, index, last, step = 0, 0, 0, 0
  conflict, added, clamped, elapsed, fence_epoch, fence_seq, bad_key = 0, 0, 0, 0, 0, 0, 0
  local status, tokens = refill(6 * i - 5, strings[2 * i - 1], strings[2 * i])
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4], reply[r + 5], reply[r + 6], reply[r + 7] = status, conflict, era, index, now, last, tokens
  reply[r + 8], reply[r + 9], reply[r + 10], reply[r + 11], reply[r + 12] = added, clamped, elapsed, fence_epoch, fence_seq
  reply[r + 13], reply[r + 14] = step, bad_key
  r = r + 14
end
return reply
