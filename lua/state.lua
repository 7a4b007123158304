-- Shared by the scripts that read {K}:ctl; the build puts it where a script says "--#include state".
-- {K}:ctl is a hash of up to three fields, each decimal integers with a space between:
--   st   index last_us carry era step_us next_us; last_us is also the highest clock seen; the last two are left out if both are 0.
--        Then there may be a # and the mark of pol: it says that there is no field out, and spares a refill the reading of both
--        fields. Refills alone set it, and whoever writes one of the fields writes st without it
--   pol  epoch seq kind capacity tokens per_us interval_us max_elapsed_us initial on_loss on_rollback
--        carry_over enforcement grant_tokens grant_end_us grant_era strict, less the zeros at the end after initial
--        enforcement is what consumers do about it: how they degrade, and 4 more in shadow mode
--   out  outstanding due_us debt: tokens held in reservations and leases, when the first record of one ends (0: there is none),
--        and tokens that refills pay before they add any; missing while all are 0
-- A pool's bucket, whose grant_end_us isn't 0, also counts in fields added and denied the tokens that refills added and that
-- takes were denied: what was consumed is added less the change of K. A bucket in shadow mode counts denied.
local TOLERANCE_US = 50000
local EXACT = 9007199254740992 -- 2^53
local ST = '^(%d+) (%d+) (%d+) (%d+)([ %d]*)$'
local POL = '^' .. string.rep('%d+ ', 8) .. '%d+[ %d]*$'
local OUT = '^(%d+) (%d+) (%d+)$'

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- state reads st and out; nil if one of them can't be read.
local function state(text, out_text)
  if not text then return nil end
  local mark = string.find(text, '#', 1, true)
  if mark then
    if not string.find(text, '^%w+$', mark + 1) then return nil end
    text = string.sub(text, 1, mark - 1)
  end
  local index, last, carry, era, instants = string.match(text, ST)
  if not era then return nil end
  local step, next_ = 0, 0
  if instants ~= '' then
    step, next_ = string.match(instants, '^ (%d+) (%d+)$')
    if not step then return nil end
  end
  local out, due, debt = 0, 0, 0
  if out_text then
    out, due, debt = string.match(out_text, OUT)
    if not out then return nil end
  end
  return {era = tonumber(era), index = tonumber(index), last = tonumber(last), carry = tonumber(carry),
    step = tonumber(step), next = tonumber(next_), out = tonumber(out), due = tonumber(due), debt = tonumber(debt)}
end

local function format_state(s)
  local text = string.format('%.0f %.0f %.0f %.0f', s.index, s.last, s.carry, s.era)
  if s.step == 0 and s.next == 0 then return text end
  return text .. string.format(' %.0f %.0f', s.step, s.next)
end

-- policy reads pol; nil if it can't be read.
local function policy(text)
  if not text or not string.find(text, POL) then return nil end
  local f = {}
  for word in string.gmatch(text, '%d+') do f[#f + 1] = tonumber(word) end
  if #f > 17 then return nil end
  for i = #f + 1, 17 do f[i] = 0 end
  return {epoch = f[1], seq = f[2], stepped = f[3] == 1, kind = f[3], capacity = f[4], tokens = f[5], per = f[6], interval = f[7],
    half = math.floor(f[7] / 2),
    max_elapsed = f[8], initial = f[9], on_loss = f[10], on_rollback = f[11], carry_over = f[12],
    counts_denied = f[13] >= 4 or f[15] > 0, grant_tokens = f[14], grant_end = f[15], grant_era = f[16], strict = f[17] == 1}
end

-- room is the most tokens that the bucket may hold: its capacity, under a strict policy without what is outstanding.
local function room(s, p)
  if p.strict then return math.max(0, p.capacity - s.out) end
  return p.capacity
end

-- put_out writes out, beside st.
local function put_out(key, s)
  if s.out == 0 and s.due == 0 and s.debt == 0 then
    redis.call('HDEL', key, 'out')
  else
    redis.call('HSET', key, 'out', string.format('%.0f %.0f %.0f', s.out, s.due, s.debt))
  end
end

-- put_held writes st and out.
local function put_held(key, s)
  redis.call('HSET', key, 'st', format_state(s))
  put_out(key, s)
end

-- integer reads a decimal integer that INCRBY accepts and doubles hold exactly: the number, nil if the key is missing, or
-- false if it holds something else, so that no write fails after another has been made.
local function integer(v)
  if v == false then return nil end
  if type(v) ~= 'string' or not (v == '0' or string.find(v, '^%-?[1-9]%d*$')) then return false end
  local n = tonumber(v)
  if n > EXACT or n < -EXACT then return false end
  return n
end

-- wrong_type answers false to the error of a key of another type and raises every other error.
local function wrong_type(reply)
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
  return false
end

-- get reads a key as integer does.
local function get(key)
  local v = redis.pcall('GET', key)
  if type(v) == 'table' then return wrong_type(v) end
  return integer(v)
end

-- read_ctl reads {K}:ctl: state, policy, the policy's text; nothing if the key is missing; false if it can't be read.
local function read_ctl(key)
  local c = redis.pcall('HMGET', key, 'st', 'pol', 'out')
  if c.err then return wrong_type(c) end
  if not c[1] and not c[2] then return nil end
  local s, p = state(c[1], c[3]), policy(c[2])
  if not s or not p then return false end
  return s, p, c[2]
end

-- told is the policy's text as takers are told it: a grant that isn't in force has grant_era 0; '' for none. It costs a command
-- for a pool's bucket only.
local function told(s, p, pol)
  if not s then return '' end
  if p.grant_era > 0 and (p.grant_era ~= s.era or now_us() >= p.grant_end) then return (string.gsub(pol, '^(' .. string.rep('%d+ ', 15) .. ')%d+', '%10')) end
  return pol
end

-- count_denied notes that a take of n tokens was denied, if the bucket counts them and could ever hold as many.
local function count_denied(key, p, n)
  if p and p.counts_denied and tonumber(n) <= p.capacity then redis.pcall('HINCRBY', key, 'denied', n) end
end

-- wait_us is the time until the bucket holds n tokens if nobody takes any: up to the refill after their credit falls due, and
-- not before the first record ends if what is outstanding leaves no room for them; half an interval if that refill is overdue;
-- 0 if it holds them; -1 if it never will.
local function wait_us(s, p, tokens, n, now)
  if tokens >= n then return 0 end
  if not s or n > p.capacity then return -1 end
  local need, due = n - tokens + s.debt, 0
  if p.stepped then
    if s.next <= s.step then return -1 end
    due = s.next + (math.ceil(need / p.tokens) - 1) * (s.next - s.step)
  else
    local units, granted, t = need * p.per - s.carry, 0, 0
    if p.grant_era == s.era then granted = math.max(0, p.grant_end - s.last) end
    local by_grant = granted * p.grant_tokens
    if units <= by_grant then
      t = math.ceil(units / p.grant_tokens)
    elseif p.tokens == 0 then
      return -1
    else
      t = granted + math.ceil((units - by_grant) / p.tokens)
    end
    due = s.last + math.ceil(t / p.interval) * p.interval
  end
  if n > room(s, p) then due = math.max(due, s.due) end
  local wait = due - now
  if wait < 1 then wait = math.floor(p.interval / 2) end
  return math.min(wait, EXACT)
end
