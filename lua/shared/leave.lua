-- Shared by the scripts that take.
--
-- least returns how many tokens a take must leave in a bucket of this capacity. leave is their number, or a percentage
-- of the capacity, as in 20%. A percentage is rounded up.
local function least(leave, capacity)
  local percent = string.match(leave, '^(%d+)%%$')
  if not percent then return tonumber(leave) end
  return math.floor(capacity / 100) * percent + math.ceil(capacity % 100 * percent / 100)
end
