-- Shared by the scripts that know a flow by its name. Include it after division.

-- fields_of returns the fields of a plan that a take for a flow needs: /, those of its teams, and its own.
local function fields_of(flow)
  local wide = match(flow, '^[^/]+/')
  local narrow = match(flow, '^[^/]+/[^/]+/')
  if narrow then return {'/', wide, narrow, flow} end
  if wide then return {'/', wide, flow} end
  return {'/', flow}
end

-- read_flow reads the part of a bucket's plan that a flow needs. It returns the places of the flow and of its teams
-- among the fields; nil if the bucket isn't divided, false if the plan can't be read.
local function read_flow(flows, flow)
  local needed = fields_of(flow)
  local last = #needed
  local divided, err = read_division(flows, needed, 1, last)
  if err then wrong_type(err) end
  return divided and {flow = last, narrow = last - 1, wide = max(1, last - 2)} or divided
end

-- pay_back gives a flow the right to n tokens back, up to the most that a flow may save.
local function pay_back(turn, n)
  local at = right(turn.flow, turn.narrow, turn.wide)
  if not at then return end
  local left = clock - used[at]
  local most = max(span, math.ceil(max(LEAST_SAVED, TAKES_SAVED * n) * prices[at]))
  if left >= most then return end
  used[at] = clock - min(most, left + floor(n * prices[at] + 0.5))
  spent = true
end

-- charge makes a flow pay for n tokens, whether it has a right to them or not.
local function charge(turn, n)
  local at = right(turn.flow, turn.narrow, turn.wide)
  if not at then return end
  used[at] = clock - saved(at, n) + floor(n * prices[at] + 0.5)
  spent = true
end
