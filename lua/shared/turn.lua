-- Shared by the scripts that make a take for a flow. Include it after denial and division.
--
-- A turn describes a take, or a run of takes, for a flow. flow, narrow and wide are the places of the flow and of its
-- teams among the fields that were read. n and leave are as in takes, with leave in tokens. field is the name under
-- which the demand was counted; nil if it wasn't.
local SOON = 20 -- an overdue plan is read again after the interval divided by this

-- served counts the demand of a turn, and makes the takes that fit into a bucket that holds tokens. It returns how many
-- tokens were taken, and for how many of them the flow pays. The caller calls write_rights afterwards.
local function served(use, turn, n, count, leave, tokens)
  turn.n = n
  turn.leave = leave
  local each = max(1, n)
  local field, before = ask(use, turn.flow, turn.narrow, turn.wide, format('%d', each * count))
  turn.field = field
  local made, paid = serve(turn.flow, turn.narrow, turn.wide, n, count, leave, before, tokens)
  return made * each, paid * each
end

-- count_refused counts n tokens of a turn as denied.
local function count_refused(use, turn, n)
  if turn.field and n > 0 then call('HINCRBY', use, '/!' .. turn.field, format('%d', n)) end
end

-- turn_us returns the time until the take of a turn fits, if no other flow takes any tokens. It fits when the bucket
-- holds the tokens above the floor. It also fits when the bucket holds the tokens and the flow has a right.
local function turn_us(turn, s, p, left, now)
  local each = max(1, turn.n)
  local within = wait_us(s, p, left, each + turn.leave, now)
  if within < 0 then return within end
  local above = wait_us(s, p, left, each + max(turn.leave, reserve), now)
  local of = right(turn.flow, turn.narrow, turn.wide)
  local refills = within == 0 and 1 or 0
  if of then refills = floor((used[of] - clock) / p.interval) + 1 end
  if refills > 0 then
    -- The plan comes after its refill, so it may be under way. Then the caller asks again soon.
    local due = advanced() + refills * p.interval - now
    if due < 1 then due = floor(p.interval / SOON) end
    within = max(within, due)
  end
  return above >= 0 and min(above, within) or within
end
