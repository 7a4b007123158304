-- flows: takes for flows from several divided buckets, one after the other, each take all or nothing.
--
-- KEYS  of each bucket: K, {K}:ctl, {K}:flows, {K}:use
-- ARGV  of each bucket:
--         with_policy: 1 to return the policy also if all takes fit
--         in_line: 1 if, after a take that doesn't fit, no later take of the same flow is made
--         below: nothing is done if the bucket holds as many tokens or more; -1 to do it for any number
--         how many fields follow, and then the fields: /, then each team of a flow, then each flow
--         how many runs follow; of each: flow, narrow, wide: the places among the fields of the flow and of its teams,
--           narrow that of the one to which it belongs, wide that of the one above it, 1 for none; n, count
--           and leave as in takes
-- Reply integers of each bucket, either
--         0, left: all takes were made, and their flows paid for none
--         6, left: all takes were made, and their flows paid for each
--         4, left, per run paid: all takes were made
--         1, now_us, left, era, index, last_us, numbers, pol..., per run taken, wait_us, paid: taken and wait_us as in
--            takes; paid: of the tokens taken, the first ones, for which the flow paid with a right
--         2: no such bucket; nothing is created
--         5: nothing was done, since the bucket is not below its bound
--         3, k: key k of K, {K}, {K}:ctl, {K}:flows, {K}:use holds something else
--
-- A bucket without a plan isn't divided. Its takes are made in order, no flow pays for them, and what they ask for is
-- not counted.
local KEYS = KEYS
local ARGV = ARGV
local call = redis.call
local pcall = redis.pcall
local find = string.find
local format = string.format
local sub = string.sub
local floor = math.floor
local max = math.max
local min = math.min
--#include shared/division
local reply = {}
local at = 0 -- the last argument read
local written
local finish

-- complete returns the functions that are needed for a bucket that denies a take or whose policy is wanted. Most calls
-- don't need them.
local function complete()
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/denial
--#include shared/turn
--#include shared/leave
--#include shared/unwritten

  -- malformed replies that key k of a bucket holds something else. Another error ends the script.
  local function malformed(k, err)
    if err then wrong_type(err) end
    reply[#reply + 1] = 3
    reply[#reply + 1] = k
  end

  -- answer adds the reply for a bucket whose takes were not all made, or whose policy is wanted.
  local function answer(divided, s, p, ctl, use, left, runs)
    local now, r = now_us(), #reply
    for k, v in ipairs({1, now, left, s.era or 0, s.index or 0, s.last or 0}) do reply[r + k] = v end
    r = r + 7
    local numbers = r
    for word in string.gmatch(policy_text(s, p), '%d+') do
      r = r + 1
      reply[r] = word + 0
    end
    reply[numbers] = r - numbers
    local denied = 0
    for _, run in ipairs(runs) do
      local n = run.n
      local wanting, wait = run.count - run.made, 0
      if wanting > 0 then
        count_refused(use, run, wanting * max(1, n))
        wait = -1
        if s.era and divided then
          wait = turn_us(run, s, p, left, now)
        elseif s.era then
          wait = wait_us(s, p, left, max(1, n) + run.leave, now)
        end
        local want = n > 0 and wanting * n or run.made == 0 and run.count or 0
        if p and (n > 0 and n + run.leave or run.count) <= p.capacity then denied = denied + want end
      end
      reply[r + 1] = run.made
      reply[r + 2] = wait
      reply[r + 3] = run.paid
      r = r + 3
    end
    if s.era then count_denied(ctl, p, denied) end
  end
  return {open = open, least = least, unwritten = unwritten, malformed = malformed, answer = answer}
end

-- all_made returns the runs whose arguments begin at first, at last or in between. All of their takes were made. paid
-- has, for each run, the number of tokens for which the flow paid.
local function all_made(first, last, paid)
  local runs = {}
  for r = first, last, 6 do
    local count = ARGV[r + 4] + 0
    runs[#runs + 1] = {count = count, made = count, paid = paid[#runs + 1]}
  end
  return runs
end

-- answer_all adds the reply for a bucket if all of its takes were made. They took tokens, and the flows paid for sum of
-- these. paid has, for each run, the number of tokens for which the flow paid.
local function answer_all(left, tokens, sum, paid)
  local r = #reply
  reply[r + 1] = sum == 0 and 0 or sum == tokens and 6 or 4
  reply[r + 2] = left
  if reply[r + 1] ~= 4 then return end
  for i, n in ipairs(paid) do reply[r + 2 + i] = n end
end

local function takes(key, ctl, flows, use)
  local with_policy, in_line = ARGV[at + 1] == '1', ARGV[at + 2] == '1'
  local below = ARGV[at + 3] + 0
  local first = at + 5
  at = at + 4 + ARGV[at + 4]
  local divided, err = read_division(flows, ARGV, first, at)
  local count_at = at + 1
  at = count_at + 6 * ARGV[count_at]
  local text = pcall('GET', key)
  local before = type(text) == 'string' and find(text, '^%-?[1-9]%d*$') and text + 0 or 0
  local exact = (before ~= 0 or text == '0') and before < 2 ^ 53 and before > -2 ^ 53
  local s, p = {}, nil
  if not exact or divided == false or with_policy then
    finish = finish or complete()
    if text and not exact then return finish.malformed(1, text.err and text) end
    if divided == false then return finish.malformed(4, err) end
    p = finish.open(s, ctl)
    if p == false then return finish.malformed(3) end
    if not text and not p then
      reply[#reply + 1] = 2
      return
    end
  end
  if below >= 0 and before >= below then
    reply[#reply + 1] = 5
    return
  end
  local left = before
  local runs, closed
  local paid, sum = {}, 0
  for r = count_at + 1, at, 6 do
    local flow = ARGV[r] + 0
    local narrow, wide = ARGV[r + 1] + 0, ARGV[r + 2] + 0
    local n, count = ARGV[r + 3] + 0, ARGV[r + 4] + 0
    local leave, asks = tonumber(ARGV[r + 5]), ARGV[r + 3]
    local each = n > 0 and n or 1
    if count > 1 or n == 0 then asks = format('%d', each * count) end
    if not leave then
      finish = finish or complete()
      p = p or finish.open(s, ctl) or nil
      leave = finish.least(ARGV[r + 5], p and p.capacity or 0)
    end
    local field, earlier, made
    local pays = 0
    if divided then field, earlier = ask(use, flow, narrow, wide, asks) end
    if closed and closed[flow] then
      made = 0
    elseif divided then
      made, pays = serve(flow, narrow, wide, n, count, leave, earlier, left)
      pays = pays * each
    else
      made = min(count, floor(max(0, left - leave) / each))
    end
    left = left - made * each
    if made < count or with_policy then
      runs = runs or all_made(count_at + 1, r - 6, paid)
    end
    paid[#paid + 1] = pays
    sum = sum + pays
    if runs then
      runs[#runs + 1] = {flow = flow, narrow = narrow, wide = wide, n = n, count = count, leave = leave, field = field,
        made = made, paid = pays}
    end
    if made < count and in_line then
      closed = closed or {}
      closed[flow] = true
    end
  end
  if left < before then
    call('DECRBY', key, format('%d', before - left))
    written = true
  end
  if divided then
    write_rights(flows)
    written = written or not uncounted
  end
  if not runs then return answer_all(left, before - left, sum, paid) end
  finish = finish or complete()
  p = p or finish.open(s, ctl) or nil -- if it can't be read, the wait is unknown
  finish.answer(divided, s, p, ctl, use, left, runs)
end

for k = 1, #KEYS, 4 do takes(KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 3]) end
if written then return reply end
finish = finish or complete()
return finish.unwritten(KEYS[2], reply)
