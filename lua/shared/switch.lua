-- Shared by the scripts that put another policy in force and are no refill; it follows bucket and credit.

-- own_step returns 1 if the step that the bucket's state names has come; otherwise 0. Then all steps up to now count as
-- credited, since it isn't known how many have come.
local function own_step(s, now)
  if s.step >= s.next or s.next > now then return 0 end
  s.step = now
  s.next = 0
  return 1
end

-- switch settles a bucket that holds tokens under its policy p and puts q in force: nothing is refilled. index is what
-- {K} holds, or nil. steps is how many are to be credited, nil for that of own_step. It returns the tokens then held;
-- the caller writes them, {K} as s.index, and s.
local function switch(s, p, q, tokens, index, now, steps)
  steps = steps or own_step(s, now)
  if (index or 0) == 0 or index == s.index then
    local _
    tokens, _, _, s.carry, s.debt = credit(p, tokens, room(s, p), now, s.last, s.carry, s.era, s.debt, steps)
  else
    s.carry = 0 -- a foreign client refills it, and has paid that stretch
  end
  tokens, s.carry = carried(p, q, tokens, s.carry)
  presume(s, p, q, tokens)
  s.index = max(index or 0, s.index) + 1
  s.last = max(s.last, now)
  return min(tokens, room(s, q))
end
