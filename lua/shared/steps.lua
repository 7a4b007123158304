-- Shared by the scripts that credit budgets. Include it after switch. A budget is a bucket of a template with a
-- schedule. No refill credits it. The call that takes from it does, and it sends the part of the schedule that the
-- script needs. That part is a text of decimal integers with a space between: full_s, and then successive instants of
-- the schedule in µs. Only the last of these instants is still to come. full_s is the instant, in seconds, a minute
-- after steps alone have filled every bucket of the template twice.

-- schedule decodes that text. It returns nil if the text is empty.
local function schedule(text)
  if text == '' then return nil end
  local instants = {}
  for word in string.gmatch(text, '%d+') do instants[#instants + 1] = word + 0 end
  local full = table.remove(instants, 1)
  return {full = full, instants = instants}
end

-- coming returns the last instant, which is the next one to come, and the instant before it. It returns nil if now is
-- not between these two.
local function coming(instants, now)
  local latest, following = instants[#instants - 1], instants[#instants]
  if now < latest or following <= now then return nil end
  return following, latest
end

-- first_step returns the first instant that counts as a new step: the middle between the last step that was credited
-- and the next one. An instant before it may be the same step, from a caller with other data of the time zone.
local function first_step(s) return s.next > s.step and floor((s.step + s.next) / 2) + 1 or s.step + 1 end

-- uncredited returns how many of the instants have come and are not credited yet. It returns nil if all of them are
-- uncredited but don't fill the bucket: then earlier instants may be uncredited, too.
local function uncredited(s, p, instants)
  local first = first_step(s)
  local most = #instants - 1
  local steps = 0
  while steps < most and instants[most - steps] >= first do steps = steps + 1 end
  if steps == most and steps * p.tokens < p.capacity + s.debt then return nil end
  return steps
end

-- advance returns how many steps are to be credited to a budget of policy p, and records them as credited in s. It
-- returns nil if the instants are not enough to know. If the call has no instants of the budget's schedule, only the
-- step that the state names is credited.
local function advance(s, p, instants, now)
  if s.step <= now and now < s.next then return 0 end
  if not instants then return own_step(s, now) end
  local following, latest = coming(instants, now)
  local steps = following and uncredited(s, p, instants)
  if not steps then return nil end
  if s.step > following then -- the clock was ahead, and the step to come may have been credited then
    s.step = following
    s.next = 0
  elseif s.step < following then
    if steps > 0 then s.step = latest end
    s.next = following
  end
  return steps
end
