-- Shared by the scripts that credit tokens. Include it after policy.
--
-- credit credits a bucket of policy p that holds tokens. If p is stepped, the credit is that of the steps; otherwise it
-- is that of the time from last to now. The credit first pays debt, and then adds tokens as far as there is room. A
-- full bucket keeps no carry. credit returns five numbers: the tokens then held; the tokens that were added or paid
-- debt; the tokens that were due but had no room; the carry; and the debt.
local function credit(p, tokens, room, now, last, carry, era, debt, steps)
  local add
  room = room + min(tokens, 0) -- below 0, plain clients are about to undo their tries, which adds tokens
  if p.stepped then
    add = steps * p.tokens
  else
    local elapsed = now - last
    if elapsed > p.max_elapsed then elapsed = p.max_elapsed elseif elapsed < 0 then elapsed = 0 end
    local units = elapsed * p.tokens + carry
    if era and p.grant_era == era then
      units = units + min(elapsed, max(0, p.grant_end - (now - elapsed))) * (p.grant_tokens - p.tokens)
    end
    carry = units % p.per
    add = (units - carry) / p.per
  end
  local paid = 0
  if debt > 0 then
    paid = min(add, debt)
    add, debt = add - paid, debt - paid
  end
  local after = tokens + add
  if after < room then return after, paid + add, 0, carry, debt end
  return room, paid + max(0, room - tokens), min(after - room, add), 0, debt
end
