-- Shared by the scripts that put another policy in force and are no refill; it follows bucket and credit.
--
-- switch settles a bucket that holds tokens under its policy p and puts q in force: nothing is refilled. index is what
-- {K} holds, or nil. It returns the tokens then held; the caller writes them, {K} as s.index, and s.
local function switch(s, p, q, tokens, index, now)
  if (index or 0) == 0 or index == s.index then
    local step_due = s.step < s.next and s.next <= now
    local _
    tokens, _, _, s.carry, s.debt = credit(p, tokens, room(s, p), now, s.last, s.carry, s.era, s.debt, step_due)
  else
    s.carry = 0 -- a foreign client refills it, and has paid that stretch
  end
  tokens, s.carry = carried(p, q, tokens, s.carry)
  presume(s, p, q, tokens)
  s.index = max(index or 0, s.index) + 1
  s.last = max(s.last, now)
  return min(tokens, room(s, q))
end
