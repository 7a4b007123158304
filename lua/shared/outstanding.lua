-- Shared by the scripts of reservations and leases. Include it after bucket.
-- Their KEYS are 1 K, 2 {K}, 3 {K}:ctl, 4 {K}:outstanding, 5 {K}:due.
-- {K}:outstanding is a hash: id to record, decimal integers with a space between: kind n until_us era, and then
--   1 lease        seq granted clamped, of its last call; and free, the tokens of the block for which its flow did not
--                  pay; left out if it is 0
--   2 reservation  overrun: 0 clamp, 1 debt; and of a divided bucket paid, as in flows, and the flow behind a slash
--   3 settled      returned clamped void charged owed forgiven: the reply to the settlement
--   4 run out      overrun void: a reservation whose time ended, and how much of it was void
-- n are the tokens outstanding, 0 for kinds 3 and 4. {K}:due is a sorted set of the ids by until_us. When the time of a
-- reservation is over, its tokens go back to the bucket. The tokens of a lease don't, because its holder may have spent
-- them. Kinds 3 and 4 are remembered for a while. So a settlement that is sent again gets the same reply, and a late
-- settlement still charges the tokens that were used.
local LEASE = 1
local RESERVATION = 2
local SETTLED = 3
local RUN_OUT = 4
local MEMORY_US = 60000000
local SWEPT = 16 -- records that each call ends beside its own work; more than the one that it adds

-- record reads a record. It returns nil if there is none, false if it can't be read.
local function record(raw)
  if type(raw) ~= 'string' then return nil end
  local numbers, flow = match(raw, '^([^/]*)/(.*)$')
  local f = {}
  for word in string.gmatch(numbers or raw, '%d+') do f[#f + 1] = word + 0 end
  if #f < 5 then return false end
  -- The fields after era depend on the kind.
  return {kind = f[1], n = f[2], ends = f[3], era = f[4], seq = f[5], overrun = f[5], granted = f[6], void = f[6],
    free = f[8] or 0, paid = f[6], flow = flow, clamped = f[7], settlement = {unpack(f, 5, 10)}}
end

local ended = {} -- set of the ids that find_due is to drop: leases that have ended, and ids in {K}:due without a record
local uncounted -- {K}:due had an id without a record

-- put_text writes the text of a record. If find_due was going to drop the id, it no longer does.
local function put_text(id, ends, text)
  call('HSET', KEYS[4], id, text)
  call('ZADD', KEYS[5], format('%d', ends), id)
  ended[id] = nil
end

-- decimals returns integers with a space between.
local function decimals(...)
  local words = {...}
  for i = 1, #words do words[i] = format('%d', words[i]) end
  return table.concat(words, ' ')
end

-- put_record writes a record. The arguments after era depend on the kind.
local function put_record(id, kind, n, ends, era, ...) put_text(id, ends, decimals(kind, n, ends, era, ...)) end

-- try is like pcall, but raises the error of a missing right. It is for commands on a key that may have been deleted.
-- Redis deletes a key when its last record is dropped, and commands on a deleted key fail while a Cluster moves the
-- slot. For the same reason records are dropped after others are written.
local function try(...)
  local reply = pcall(...)
  local err = type(reply) == 'table' and reply.err
  if err and (find(err, 'NOPERM') or find(err, 'executing the script')) then error(reply) end
  return reply
end

local function drop_record(id)
  try('HDEL', KEYS[4], id)
  try('ZREM', KEYS[5], id)
end

-- count is called after a key of the bucket was lost. It sets s.out to the sum of the records, and restores missing
-- ends from the records. If {K}:due has an id without a record, s.out does not fall. It returns the instant at which
-- the last record ends.
local function count(s)
  local all = try('HGETALL', KEYS[4]) -- an error has no elements
  local sum = 0
  local records = 0
  local last = 0
  for i = 1, #all, 2 do
    local r = record(all[i + 1])
    if r then
      sum = sum + r.n
      records = records + 1
      last = max(last, r.ends)
      call('ZADD', KEYS[5], format('%d', r.ends), all[i])
    end
  end
  local ends = try('ZCARD', KEYS[5])
  if type(ends) == 'number' and ends > records then sum = max(sum, s.out) end
  s.out = sum
  return last
end

-- find_due drops the records that have ended, and sets when the first record ends. If no record is left, it sets s.out
-- to 0.
local function find_due(s)
  for id in pairs(ended) do drop_record(id) end
  if uncounted then count(s) end
  local first = try('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')
  s.due = first[2] and first[2] + 0 or 0
  if s.due == 0 then
    s.out = 0
    try('DEL', KEYS[4])
  end
end

-- put_tokens changes K from before to tokens.
local function put_tokens(tokens, before)
  if tokens ~= before then call('INCRBY', KEYS[1], format('%d', tokens - before)) end
end

-- outlive makes a bucket whose keys expire live at least until a minute after an instant. Takes and refills also enter
-- a new expiry in the sets of the template, but outlive doesn't. So a caller that reserves or leases first opens the
-- bucket of a template for that long. Then outlive has to move the expiry only if the caller didn't open the bucket, or
-- if a reservation is settled after its time.
local function outlive(instant, now)
  local left = call('PTTL', KEYS[3])
  if left < 0 then -- the bucket doesn't expire; it may have been a template's before
    if try('PERSIST', KEYS[4]) == 1 then try('PERSIST', KEYS[5]) end
    return
  end
  local need = math.ceil((instant - now) / 1000) + 60000
  if left < need then
    left = need
    for i = 1, 3 do call('PEXPIRE', KEYS[i], format('%d', left)) end
  end
  for i = 4, 5 do try('PEXPIRE', KEYS[i], format('%d', left)) end -- they may have been deleted
end

-- restore counts the outstanding tokens of a bucket again. It is called if the state and the records disagree on when
-- the first record ends, because one of them was lost. It returns the tokens then held. Under a strict policy these are
-- no more than there is room for.
local function restore(s, p, tokens)
  local now = now_us()
  local last = count(s)
  find_due(s)
  local held = p.strict == 1 and min(tokens, room(s, p)) or tokens
  put_tokens(held, tokens)
  put(s, p, KEYS[3])
  outlive(max(last, now), now)
  return held
end

-- read_outstanding reads the bucket and the record of an id, '' for none. It returns the reply that ends the script, or
-- nil and state, policy, tokens, record.
local function read_outstanding(id)
  local s = {}
  local p = open(s, KEYS[3])
  if p == false then return {3, 3} end
  if not p then return {2} end
  local tokens = get_integer(KEYS[1])
  if tokens == false then return {3, 1} end
  local raw = pcall('HGET', KEYS[4], id)
  if type(raw) == 'table' then
    wrong_type(raw)
    return {3, 4}
  end
  local r = record(raw)
  if r == false then return {3, 4} end
  local first = pcall('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')
  if first.err then
    wrong_type(first)
    return {3, 5}
  end
  s.lost, tokens = not tokens, tokens or 0
  if (first[2] or 0) + 0 ~= s.due then tokens = restore(s, p, tokens) end
  return nil, s, p, tokens, r
end

-- give_back adds n tokens of an era to the bucket, as far as there is room. It returns four numbers: the tokens then
-- held, and how many of the n tokens were returned, were clamped, and are void because the bucket is in another era.
local function give_back(s, p, tokens, n, era)
  if era ~= s.era then return tokens, 0, 0, n end
  local clamped = excess(s, p, tokens, n)
  return tokens + n - clamped, n - clamped, clamped, 0
end

-- end_due ends records whose time is over. most is the largest number to end. The caller calls find_due afterwards.
-- end_due returns the tokens then held, and a list: how many tokens were returned, were clamped, are void, and were
-- dropped with leases.
local function end_due(s, p, tokens, now, most)
  local sum = {0, 0, 0, 0}
  if s.due == 0 or s.due > now then return tokens, sum end
  for _, id in ipairs(try('ZRANGEBYSCORE', KEYS[5], '-inf', format('%d', now), 'LIMIT', 0, most)) do
    local r = record(try('HGET', KEYS[4], id))
    if r and r.kind == RESERVATION then
      local returned, clamped, void
      s.out = max(0, s.out - r.n)
      tokens, returned, clamped, void = give_back(s, p, tokens, r.n, r.era)
      sum = {sum[1] + returned, sum[2] + clamped, sum[3] + void, sum[4]}
      put_record(id, RUN_OUT, 0, now + MEMORY_US, r.era, r.overrun, void)
    else
      if r then
        s.out = max(0, s.out - r.n)
        sum[4] = sum[4] + r.n
      end
      uncounted = uncounted or not r
      ended[id] = true
    end
  end
  return tokens, sum
end
