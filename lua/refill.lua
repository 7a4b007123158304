-- refill: credits buckets the tokens that are due. Each bucket is credited if the caller's (era, index) for it is the
-- stored one, whatever happens to the others.
--
-- KEYS  K of each of n buckets, then {K} of each, then {K}:ctl of each. A call that creates or adopts a bucket also
--       reads {K}:override, in the slot of the other keys
--       then, if the buckets are of one template and the template's sets share their slot: the shard of its active set,
--       and the set of its buckets alive. See Idle buckets below
-- ARGV  per bucket the state that the caller remembers from its last call, one of
--         st (see bucket) to the letter, if the policy given here was in force then and smooth, and nothing was
--         outstanding
--         st up to index, with any last_us, in all other cases
--         '' if the caller has never read the bucket
--       how many policies follow, then of each: the number, from 1, of the first bucket for which it is given; pol, ''
--       for none
--       then of each bucket that differs from the default: its number; create; step_us, next_us: the scheduled instant
--       to credit and the one after it. By default a bucket has no instants, and create is 1, or 0 if the call has the
--       keys of a shard
--       create: 0 creates and adopts no bucket; 1 adopts a foreign client's bucket, and creates one that the caller
--       remembers; 2 also creates a new one
-- Reply now_us, then per bucket integers, either
--       tokens, 0 or more, if the bucket was exactly in the remembered state. If they fill the bucket, a second number
--       follows: added if the bucket is idle, -1 - added if it is not; or
--       -status, tokens, added, clamped, elapsed_us, flags, era, index, last_us, carry, kind, version, pools_version,
--       epoch, seq, step_us, malformed_key, outstanding, due_us, debt: index is the copy in st; added includes what
--       paid debt
-- status 1 applied     credited what was due
--        2 switched    the remembered state is old, but the given policy is newer: credited under the old policy, then
--                      switched
--        3 stale       the remembered state is old; nothing written
--        4 early       under half an interval since the last refill; nothing written
--        5 foreign     another client moved the index: the time until then is not credited again
--        6 initialised created, or a foreign client's bucket adopted
--        7 unknown     no such bucket, and this call may not create it; nothing written
--        8 rolled back this server has lost a write that the caller remembers: new era
--        9 clock       this server's clock stepped back: new era
--       10 malformed   key malformed_key of the three holds something else; nothing written
--       11 conflict    the policy in force is a pool's and the given one isn't, or the reverse, and the given one is of
--                      no later version of the configuration; nothing written
-- A conflict is not reported if the remembered state is old, or if the status is rolled back or clock.
-- flags: 1 the policy given differs from the one in force under the same fence, and is ignored; 2 the call left the
--        bucket idle; 4 it put another policy in force
--
-- Every call that writes adds one to the index. The credit depends only on the elapsed time on this server's clock. So
-- a call that wins adds exactly what is due, however late it comes and however often it is sent. Bucket.Refill in
-- package policy states the same rules in Go.
--
-- Idle buckets. A bucket is idle if it is full, nothing is outstanding, and in the last 15 s it was not adopted and its
-- capacity was not lowered. The shard then drops it. The shard also drops names that are no template's buckets. If less
-- than half the life of a template's bucket is left, the bucket gets a new expiry. The script checks that when the
-- policy changes, and every few refills, which is at most an eighth of a life.
--#include shared/policy
--#include shared/credit
-- globals are slow
local KEYS = KEYS
local ARGV = ARGV
local tonumber = tonumber
local type = type
local LOWERED_US = 15000000 -- longer than consumers use a policy before they read it again: fetch.policyMaxAge
local n = floor(#KEYS / 3)
local shard, alive_set = KEYS[3 * n + 1], KEYS[3 * n + 2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local since_now = format('%16d', now) .. ' %d %d' -- st from last_us on
local stock = call('MGET', unpack(KEYS, 1, n)) -- nil for a key of another type
local reply, r = {now, unpack(KEYS, 1, n)}, 1 -- room for the answers: a table that grows costs

-- idle reports whether a full bucket of policy p may leave the active set: consumers know its capacity.
local function idle(p, key_ctl)
  local lowered = p.kind == TEMPLATE and pcall('HGET', key_ctl, 'lowered')
  return type(lowered) ~= 'string' or now - lowered > LOWERED_US
end

-- complete returns the functions that are needed for a bucket that has changed since the caller last read it. Most
-- calls don't need them, and creating them costs time.
local function complete()
--#include shared/redis
--#include shared/bucket
--#include shared/expiry
  local NONE = policy('0 0 1 0 1 1')
  local MOST_INDEX = 99999999999998 -- one more has 14 digits
  local unlike, as_others = {}, {shard and '0' or '1', 0, 0} -- create, step_us, next_us
  for a = n + 2 + 2 * ARGV[n + 1], #ARGV, 4 do unlike[ARGV[a] + 0] = {ARGV[a + 1], ARGV[a + 2] + 0, ARGV[a + 3] + 0} end
  -- s is the bucket that is being refilled: its state (see open), status and tokens. s.was and s.stored are the values
  -- of K and {K}. s.p is the policy in force before the call, and s.after the policy in force after it. s.writes is set
  -- if the bucket is to be written; the new index must then exceed s.least. s.credits is set if the time since s.last
  -- is to be credited.
  local s

  -- resolve returns the policy in force after a call that gives q while p is in force. It also returns how q relates to
  -- p: it conflicts, differs under the same fence, is newer, or is older.
  local function resolve(p, q)
    if not q or q == p then return p end
    if (p.kind == POOL) ~= (q.kind == POOL) then -- only a configuration makes a plain bucket a pool's, not a grant
      if q.version > p.version and q.epoch == 0 then return q end
      return p, 'conflicts'
    end
    local fence, how = {'version', 'seq'}, 'differs'
    if p.kind == POOL then fence = p.epoch + q.epoch > 0 and {'epoch', 'seq'} or {'pools_version'} end
    for _, name in ipairs(fence) do
      if how == 'differs' and q[name] ~= p[name] then how = q[name] > p[name] and 'newer' or 'older' end
    end
    if p.kind ~= POOL then return how == 'newer' and q or p, how end
    local latest = {version = max(p.version, q.version), pools_version = max(p.pools_version, q.pools_version)}
    local after, same = altered(how == 'newer' and q or p, latest), altered(q, latest)
    return after, after ~= same and how
  end

  -- initialise creates or adopts a bucket without state, if it may. An override with a rate stays in force when its key
  -- becomes a configured bucket. One without a rate is of a budget, whose schedule is the template's.
  local function initialise(q, create, key_override, seen_era, seen_index, following)
    s.status = 7
    if not q or create == '0' then return end
    local was = s.was or 0
    local adopted = was > 0 or s.stored > 0
    if adopted then
      s.tokens = min(was, q.capacity)
    elseif seen_era == 0 and create ~= '2' then
      return
    else
      -- A plain client that tries to take from a missing bucket leaves K with 0 tokens and nothing else. A number below
      -- 0 is a try that the client is about to undo.
      local begins = q.capacity - q.lacking
      if seen_era > 0 then begins = after_loss(q) end
      s.tokens = begins + was
    end
    local own = q.kind ~= POOL and pcall('GET', key_override)
    own = type(own) == 'string' and policy(own)
    if own and own.kind == TEMPLATE then q = own end
    s.status = 6
    s.era = next_era(seen_era, now)
    s.step = now
    s.next = following
    s.writes = true
    s.least = seen_index
    s.p = q
    s.after = q
    s.new = true
    s.adopted = adopted
    if adopted or seen_era > 0 then s.due = UNCOUNTED end -- there was a state before
    presume(s, nil, q, s.tokens)
  end

  -- begin_era begins a new era of a bucket that was rolled back, or whose clock was set back. Grants, leases and
  -- returns of the old era are then void.
  local function begin_era(status, seen_era)
    s.status = status
    s.writes = true
    if now < s.last - TOLERANCE_US then s.last = now end -- finish raises a last refill that is earlier than now
    s.era = next_era(max(s.era, seen_era), now)
  end

  -- assess reads bucket i, for which policy q is given, and decides what the call does to it.
  local function assess(i, q)
    s = {differs = 0, elapsed = 0, tokens = 0, era = 0, index = 0, last = 0, carry = 0, step = 0, next = 0, out = 0,
      due = 0, debt = 0, least = 0}
    local mine, how = unlike[i] or as_others, nil
    local seen_era, seen_index = match(ARGV[i], '^( *%d+) +%d+ (%d+)')
    seen_era, seen_index = tonumber(seen_era) or 0, tonumber(seen_index) or 0
    local p = open(s, KEYS[2 * n + i])
    local tokens = get_integer(KEYS[i])
    local stored = get_integer(KEYS[n + i])
    s.bad = tokens == false and 1 or (stored == false or (stored or 0) > MOST_INDEX) and 2 or p == false and 3 or 0
    s.p = p
    s.after = p
    s.was = tokens
    s.stored = stored or 0
    s.status = 10
    if s.bad > 0 then return end
    if not p then return initialise(q, mine[1], KEYS[n + i] .. ':override', seen_era, seen_index, mine[3]) end
    s.tokens = tokens or after_loss(p)
    s.after, how = resolve(p, q)
    if how == 'differs' then s.differs = 1 end

    -- The instants of the call are used only if they are of the schedule in force. period is the time between the last
    -- step and the next one, 0 if it isn't known.
    local scheduled = p.stepped and q and q.per == p.per
    local step = scheduled and mine[2] or 0
    local following = scheduled and mine[3] or 0
    local period = 0
    if p.stepped then
      period = s.next > s.step and s.next - s.step or max(0, following - (step > 0 and step or s.step))
    end

    if seen_era > s.era or (seen_era == s.era and seen_index > s.index) then
      -- This server came back with an older state than the caller has read, so it has lost the takes since then. The
      -- bucket is emptied, unless its policy keeps the tokens. The policy after the call decides, because the server
      -- may have lost a later policy, too. (A number below 0 stays: a plain client is about to undo it.) Nothing is
      -- credited for the time before. The new index is higher than the caller's.
      s.least = seen_index
      s.carry = 0
      s.tokens = min(s.tokens, s.after.on_rollback == 1 and p.capacity or 0)
      -- If the bucket is emptied, a step that the server may have forgotten counts as credited.
      if period > 0 and s.after.on_rollback == 0 then
        s.step = min(max(s.step, now, step), now + period)
        s.next = s.step + period
      end
      return begin_era(8, seen_era)
    end
    if now < s.last - TOLERANCE_US then
      -- The clock stepped back: credit begins at the present. If the last step is far ahead, it is set to one period
      -- from now. So the next step comes earlier, but no step of the last period is credited twice.
      if period > 0 and s.step > now + period then s.step, s.next = now + period, now + 2 * period end
      return begin_era(9, seen_era)
    end

    local stale = seen_era < s.era or seen_index < s.index
    if not scheduled and s.after ~= p then step = s.next end -- the last step before another schedule begins
    s.step_due = p.stepped and s.step < step and step <= now
    s.status = stale and s.after == p and 3 or how == 'conflicts' and 11
      or s.after == p and not s.step_due and now - s.last < p.half and 4
    if s.status then return end
    s.writes = true
    if s.stored ~= 0 and s.stored ~= s.index then
      s.status, s.carry = 5, 0
    else
      s.status = stale and 2 or 1
      s.credits = true
      s.elapsed = max(0, now - s.last)
    end
    if s.step_due then s.step, s.next = step, 0 end
    if following > s.step then
      s.next = following
    elseif now < following and following < s.step then -- the clock was ahead when the schedule began
      s.step, s.next = following, 0 -- the instant to come may have been credited then
    end
  end

  -- finish assesses bucket i, for which policy q is given, credits it, writes it, and adds its reply. It returns the
  -- policy in force, the index, whether the bucket is idle, and whether the policy has changed.
  local function finish(i, q)
    assess(i, q)
    local after = s.after
    local tokens = s.tokens
    local added = 0
    local clamped = 0
    if s.credits then
      tokens, added, clamped, s.carry, s.debt =
        credit(s.p, tokens, room(s, s.p), now, s.last, s.carry, s.era, s.debt, s.step_due and 1 or 0)
    end
    if s.writes then
      local keys = {KEYS[i], KEYS[n + i], KEYS[2 * n + i]}
      s.last = max(s.last, now)
      if after ~= s.p then
        tokens, s.carry = carried(s.p, after, tokens, s.carry)
        if after.stepped and after.per ~= s.p.per then -- the new schedule begins now
          s.step, s.next = max(s.step, now), (unlike[i] or as_others)[3]
        end
        presume(s, s.p, after, tokens)
      end
      tokens = min(tokens, room(s, after)) -- a foreign client may have left more
      s.index = max(s.stored, s.index, s.least) + 1
      call('INCRBY', keys[2], format('%d', s.index - s.stored))
      if tokens ~= s.was then call('INCRBY', keys[1], format('%d', tokens - (s.was or 0))) end
      put(s, after, keys[3], (s.new or after ~= s.p) and after.text)
      record_lowered(keys[3], not s.adopted and s.p, after, now)
      if not after.expires and (s.new or s.p.expires) then
        disarm(keys)
      elseif not s.was or s.stored == 0 then
        rejoin(keys)
      end
      if after.kind == POOL and added > 0 then pcall('HINCRBY', keys[3], 'added', format('%d', added)) end
    end
    local is_idle = s.writes and tokens >= after.capacity and s.due == 0 and idle(after, KEYS[2 * n + i])
    local switched = after ~= s.p
    local f = after or NONE
    local flags = s.differs + (is_idle and 2 or 0) + (switched and 4 or 0)
    for k, v in ipairs({-s.status, tokens, added, clamped, s.elapsed, flags, s.era, s.index, s.last, s.carry, f.kind,
      f.version, f.pools_version, f.epoch, f.seq, f.stepped and s.step or 0, s.bad, s.out, s.due, s.debt}) do
      reply[r + k] = v
    end
    r = r + 20
    return after, s.index, is_idle, switched
  end

  -- renew gives a template's bucket a new expiry if less than half its life is left.
  local function renew(i, p)
    local till, new = arm({KEYS[i], KEYS[n + i], KEYS[2 * n + i]}, p.life_s, now, 0.5, 0)
    if shard then outlast(shard, till) end
    if new and alive_set then record_alive(alive_set, KEYS[i], till, true) end
  end
  return finish, renew
end

local finish, renew
local policy_at = n + 2
local begins = ARGV[n + 1] ~= '0' and 1
local given
for i = 1, n do
  if i == begins then
    given = policy(ARGV[policy_at + 1])
    policy_at = policy_at + 2
    begins = policy_at < n + 2 + 2 * ARGV[n + 1] and ARGV[policy_at] + 0
  end
  local key = KEYS[i]
  local key_index = KEYS[n + i]
  local key_ctl = KEYS[2 * n + i]
  local p = given
  local st, before = pcall('HGET', key_ctl, 'st'), tonumber(stock[i])
  -- If st is exactly what the caller last read, nothing has been written since. Then the given policy is in force, and
  -- nothing is outstanding.
  local at = st == ARGV[i] and p and find(st, ' ', 36) -- before carry: the index at 35 has a digit
  local last = at and before and before >= 0 and before < 2 ^ 53 and sub(st, 18, 33) + 0
  local index, as_seen, is_idle, switched
  if last and now - last >= p.half then
    index = pcall('INCR', key_index)
    as_seen = index == sub(st, 35, at) + 1 -- otherwise another caller has moved it
  end
  if as_seen then
    local tokens, added, _, carry =
      credit(p, before, p.capacity, now, last, sub(st, at) + 0, p.kind == POOL and sub(st, 1, 16) + 0, 0)
    if tokens ~= before then -- INCRBY refuses what tonumber takes for a number and is none
      as_seen = type(pcall('INCRBY', key, format('%d', tokens - before))) == 'number'
    else
      as_seen = stock[i] == '0' or find(stock[i], '^%-?[1-9]%d*$')
    end
    if as_seen then
      call('HSET', key_ctl, 'st', sub(st, 1, 17) .. format(since_now, index, carry))
      if p.kind == POOL and added > 0 then pcall('HINCRBY', key_ctl, 'added', format('%d', added)) end
      reply[r + 1] = tokens
      r = r + 1
      if tokens >= p.capacity then
        is_idle = idle(p, key_ctl)
        reply[r + 1] = is_idle and added or -1 - added
        r = r + 1
      end
    end
  end
  if not as_seen then
    if type(index) == 'number' then call('DECR', key_index) end
    if not finish then finish, renew = complete() end
    p, index, is_idle, switched = finish(i, p)
  end
  if shard and (is_idle or not p or p.kind ~= TEMPLATE) then
    pcall('SREM', shard, key)
  elseif p and p.kind == TEMPLATE and (switched or index % p.refills_per_check == 0) then
    if not renew then finish, renew = complete() end
    renew(i, p)
  end
end
return reply
