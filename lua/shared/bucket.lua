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
