
-- pacing: a queue whose places are evenly spaced. Its numbers: a rate of tokens per per_us, in lowest terms, and the
-- longest wait in µs. The key holds the instant of the next free place. Without a key the next free place is now. A
-- place can't be given back, because the later takers already have their times.
rules.pacing = function(key, what, n, now, tokens, per_us, longest_us)
  local longest = longest_us * tokens
  local wait = ahead(key, now, tokens)
  if not wait then return nil end
  local function left(d)
    if d > longest then return 0 end
    return math.floor((longest - d) / per_us) + 1
  end
  local function more(d)
    if left(d) == left(0) then return 0 end
    return math.ceil((d - longest + left(d) * per_us) / tokens)
  end
  local us = math.ceil(wait / tokens)
  return wait <= longest, left(wait), math.ceil((wait - longest) / tokens), us, us, more(wait), function()
    if what == -1 then return left(wait), us, more(wait) end
    wait = wait + n * per_us
    return left(wait), store_ahead(key, now, tokens, wait), more(wait)
  end
end
