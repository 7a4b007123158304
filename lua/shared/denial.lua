-- Shared by the scripts that may deny tokens. Include it after bucket.

-- policy_text returns the text of the policy for a reply, '' for none. If the policy has a grant that isn't in force,
-- grant_era is 0 in the text. Only a pool's bucket has a grant.
local function policy_text(s, p)
  if not p then return '' end
  if p.grant_era > 0 and (p.grant_era ~= s.era or now_us() >= p.grant_end) then
    return (string.gsub(p.text, '%d+$', '0'))
  end
  return p.text
end

-- count_denied adds n to the tokens that were denied, if the bucket counts them.
local function count_denied(key, p, n)
  local counts = p and (p.kind == POOL or p.enforcement % 8 >= 4)
  if counts and n > 0 then pcall('HINCRBY', key, 'denied', format('%d', n)) end
end

-- wait_us returns the time until the bucket holds n tokens, if no caller takes any. It returns 0 if the bucket holds
-- them, and -1 if it never will. The time ends with the first refill at which the tokens are due. If that refill is
-- overdue, the time is half an interval. If the outstanding tokens leave no room for n, it is at least the time until
-- the first reservation or lease ends.
local function wait_us(s, p, tokens, n, now)
  if tokens >= n then return 0 end
  if not p or n > p.capacity then return -1 end
  local need = n - tokens + s.debt
  local due
  if p.stepped then
    if s.next <= s.step then return -1 end
    due = s.next + (math.ceil(need / p.tokens) - 1) * (s.next - s.step)
  else
    local units = need * p.per - s.carry
    local last = s.last
    local granted = 0
    local t
    if now < last - TOLERANCE_US then
      last = now -- the clock went back: the next refill begins an era at this time, without a grant
    elseif p.grant_era == s.era then
      granted = max(0, p.grant_end - last)
    end
    local by_grant = granted * p.grant_tokens
    if units <= by_grant then
      t = math.ceil(units / p.grant_tokens)
    elseif p.tokens == 0 then
      return -1
    else
      t = granted + math.ceil((units - by_grant) / p.tokens)
    end
    due = last + math.ceil(t / p.interval) * p.interval
  end
  if n > room(s, p) then due = max(due, s.due) end
  local wait = due - now
  if wait < 1 then wait = floor(p.interval / 2) end
  return min(wait, EXACT)
end

-- denial counts a denied take of n tokens, and returns the values of the reply: tokens, wait_us, era, index, last_us,
-- now_us, pol. wait_us is the time until the needed tokens, and those that must be left, are due. needed is n, or 1 if
-- the take accepts fewer than n. If the bucket has no state, the numbers of the state are 0 and pol is ''.
local function denial(key, s, p, now, tokens, n, needed, leave)
  if not p then return tokens, -1, 0, 0, 0, now, '' end
  if n <= p.capacity then count_denied(key, p, n) end
  return tokens, wait_us(s, p, tokens, needed + leave, now), s.era, s.index, s.last, now, policy_text(s, p)
end
