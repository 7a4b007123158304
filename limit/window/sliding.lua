
-- sliding: tokens in any stretch of time as long as the window. Its numbers: the limit, the length of a slot in µs and
-- the number of slots in a window.
-- The key holds the newest slot with a take, the length of the slots in µs, and then the tokens taken in it and in each
-- slot before it. If the slots have another length, another program wrote them, or the length was changed. Tokens of
-- such a slot count in the slot that contains its end, so they never count too short. Tokens count until their whole
-- slot has left the window. If they are returned, they go back to their slot or, if that isn't known, to the oldest
-- slots.
rules.sliding = function(key, what, n, now, limit, slot_us, slots, window)
  local v = get_text(key)
  if v == false or v and not string.find(v, '^%d+ [1-9]%d*[ %d]*$') then return nil end
  local slot = math.floor(now / slot_us)
  local taken = {}
  local used = 0
  for age = 0, slots do taken[age] = 0 end
  if v then
    local newest, length, rest = string.match(v, '^(%d+) (%d+)(.*)$')
    local ends = (newest + 1) * length
    for word in string.gmatch(rest, '%d+') do
      -- The end of the slot is in the future, or the clock went back: the tokens count as taken now.
      local age = math.max(0, slot - math.floor((ends - 1) / slot_us))
      if age <= slots then taken[age], used = taken[age] + tonumber(word), used + tonumber(word) end
      ends = ends - length
    end
  end
  -- leaves is the time until a slot of an age has left the window.
  local function leaves(age) return (slot - age + slots + 1) * slot_us - now end
  local function reset()
    for age = 0, slots do
      if taken[age] > 0 then return leaves(age) end
    end
    return 0
  end
  -- until_free is the time until at most most tokens of the window are taken.
  local function until_free(most)
    local wait, excess = 0, used - most
    for age = slots, 0, -1 do
      if excess > 0 then
        excess = excess - taken[age]
        wait = leaves(age)
      end
    end
    return wait
  end
  local function more() return used == 0 and 0 or until_free(math.min(used, limit) - 1) end
  return used + n <= limit, math.max(0, limit - used), until_free(limit - n), reset(), 0, more(), function()
    if what == 1 then
      taken[0], used = taken[0] + n, used + n
    else
      -- Tokens are removed from the oldest slot first, so that those that remain count longer.
      local first, last = slots, 0
      if window > 0 then
        last = math.max(0, slot - window) -- if the clock went back, the tokens count as taken now
        first = math.min(slots, last)
      end
      for age = first, last, -1 do
        local back = math.min(n, taken[age])
        taken[age] = taken[age] - back
        used = used - back
        n = n - back
      end
    end
    local oldest, newest = 0, slots
    for age = 0, slots do
      if taken[age] > 0 then oldest, newest = age, math.min(newest, age) end
    end
    local left = math.max(0, limit - used)
    if used == 0 then
      redis.call('DEL', key)
      return left, 0, 0
    end
    local words = {string.format('%.0f %.0f', slot - newest, slot_us)}
    for age = newest, oldest do words[#words + 1] = string.format('%.0f', taken[age]) end
    store(key, table.concat(words, ' '), now + leaves(newest))
    return left, leaves(newest), more()
  end
end
