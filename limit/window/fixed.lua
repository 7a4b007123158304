
-- fixed: tokens per window, which starts at its first take. Its numbers: the limit and the window in ms.
-- The key holds the tokens left and expires with the window, whose name is its end in ms. Below zero, which a client that only knows DECR can make it,
-- none are left. A key without an expiry, which DECR makes of a missing one, belongs to no window.
rules.fixed = function(key, what, n, now, limit, window_ms, _, window)
  local left, now_ms, ends = integer(key), math.floor(now / 1000), 0
  if left == false then return nil end
  if left then
    ends = redis.call('PEXPIRETIME', key)
    if ends > now_ms + window_ms then -- the clock went back, or the window became shorter
      ends = now_ms + window_ms
      redis.call('PEXPIREAT', key, string.format('%.0f', ends))
    end
  end
  local live = ends > now_ms
  if live then left = math.max(0, math.min(limit, left)) else left = limit end
  local rest = 0
  if live then rest = ends * 1000 - now end
  return n <= left, left, rest, rest, 0, function()
    if what == -1 then
      if not live or window > 0 and window ~= ends then return left, rest end
      left = math.min(limit, left + n)
    else
      if not live then ends = now_ms + window_ms end
      left = left - n
    end
    store(key, string.format('%.0f', left), ends * 1000)
    return left, ends * 1000 - now
  end
end
