
-- fixed: tokens per window, which starts at its first take, or is a window of the calendar. Its numbers: the limit; the
-- length of the window in ms; and, for a window of the calendar, its end in ms, otherwise 0. The key holds the number
-- of tokens taken, so that a changed limit counts them. It expires with the window. The end of the window in ms names
-- the window. A number below zero counts as 0. A key without an expiry, which INCR of a client creates, belongs to no
-- window.
rules.fixed = function(key, what, n, now, limit, window_ms, calendar_ms, window)
  local now_ms = math.floor(now / 1000)
  local ends = 0
  local latest = calendar_ms
  if calendar_ms == 0 then
    latest = now_ms + window_ms
  elseif now_ms >= calendar_ms or now_ms < calendar_ms - window_ms then
    return nil, true
  end
  local taken = get_integer(key)
  if taken == false then return nil end
  if taken then
    ends = redis.call('PEXPIRETIME', key)
    if ends > latest then -- the clock went back, or the window became shorter
      ends = latest
      redis.call('PEXPIREAT', key, string.format('%.0f', ends))
    end
  end
  local live, rest = ends > now_ms, 0
  if live then taken, rest = math.max(0, taken), ends * 1000 - now else taken = 0 end
  return taken + n <= limit, math.max(0, limit - taken), rest, rest, 0, taken > 0 and rest or 0, function()
    if what == 1 then
      if not live then ends = latest end
      taken = taken + n
    elseif live and (window == 0 or window == ends or window > latest) then -- later only if the clock went back
      taken = math.max(0, taken - n)
    else
      return math.max(0, limit - taken), rest, taken > 0 and rest or 0
    end
    store(key, string.format('%.0f', taken), ends * 1000)
    return math.max(0, limit - taken), ends * 1000 - now, taken > 0 and ends * 1000 - now or 0
  end
end
