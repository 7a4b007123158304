
-- lazy: a bucket that each call first credits. Its numbers: a rate of tokens per per_us, in lowest terms, and the
-- capacity. The key holds the instant at which the bucket is full. The bucket lacks the tokens that fall due until
-- then. So a full bucket has no key, and time that passes while it is full adds nothing.
rules.lazy = function(key, what, n, now, tokens, per_us, capacity)
  local full = capacity * per_us
  local lacks = ahead(key, now, tokens)
  if not lacks then return nil end
  local after = lacks + n * per_us
  local function left(d) return math.max(0, math.floor((full - d) / per_us)) end
  local function more(d)
    if left(d) >= capacity then return 0 end
    return math.ceil((d - full + (left(d) + 1) * per_us) / tokens)
  end
  local wait, reset = math.ceil((after - full) / tokens), math.ceil(lacks / tokens)
  return after <= full, left(lacks), wait, reset, 0, more(lacks), function()
    if what == -1 then after = math.max(0, lacks - n * per_us) end
    return left(after), store_ahead(key, now, tokens, after), more(after)
  end
end
