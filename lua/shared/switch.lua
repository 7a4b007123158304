-- Shared by the scripts that put another policy in force, except refill. Include it after bucket and credit.

-- own_step returns 1 if the next step in the bucket's state has come; otherwise 0. If it has come, all steps up to now
-- count as credited, because the script doesn't know how many have come.
local function own_step(s, now)
  if s.step >= s.next or s.next > now then return 0 end
  s.step = now
  s.next = 0
  return 1
end

-- switch credits a bucket under its policy p, and then puts q in force. It does not count as a refill. tokens is the
-- number of the bucket's tokens. index is the value of {K}, or nil. steps is the number of steps to credit; if it is
-- nil, own_step decides. switch returns the tokens then held. The caller writes them, {K} as s.index, and s.
local function switch(s, p, q, tokens, index, now, steps)
  steps = steps or own_step(s, now)
  if (index or 0) == 0 or index == s.index then
    local _
    tokens, _, _, s.carry, s.debt = credit(p, tokens, room(s, p), now, s.last, s.carry, s.era, s.debt, steps)
  else
    s.carry = 0 -- another client moved the index, and has added the tokens of that time
  end
  tokens, s.carry = carried(p, q, tokens, s.carry)
  presume(s, p, q, tokens)
  s.index = max(index or 0, s.index) + 1
  s.last = max(s.last, now)
  return min(tokens, room(s, q))
end
