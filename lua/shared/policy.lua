-- Shared by the scripts that read a bucket's policy. A script's line "--#include shared/policy" is replaced by this
-- file. pol is a text of decimal integers with a space between, in the order of fields. Zeros at the end are left out
-- from the seventh number on.
--   kind         0 plain, 1 stepped, 2 of a template, 3 of a pool, 4 a budget, which is stepped and of a template
--   per          µs; of a stepped policy a number that names its schedule
--   interval     µs, as is grant_end
--   lacking      the capacity less the tokens of a new bucket
--   enforcement  the number of the degraded mode; 4 is added in shadow mode, and 8 if the bucket has flows
local STEPPED = 1
local TEMPLATE = 2
local POOL = 3
local BUDGET = 4
local call, pcall = redis.call, redis.pcall -- pcall answers an error as a reply
local find = string.find
local format = string.format
local match = string.match
local sub = string.sub
local floor = math.floor
local max = math.max
local min = math.min
local policies = {}

local function fields()
  return {'version', 'kind', 'capacity', 'tokens', 'per', 'interval', 'lacking', 'on_loss', 'on_rollback', 'carry_over',
    'enforcement', 'strict', 'pools_version', 'epoch', 'seq', 'grant_tokens', 'grant_end', 'grant_era'}
end

-- policy returns the policy that the text pol describes; false if it can't be read. A script decodes each text once.
local function policy(text)
  local p = policies[text]
  if p ~= nil then return p end
  policies[text] = false
  local version, kind, capacity, tokens, per, interval, rest =
    match(text, '^(%d+) ([0-4]) (%d+) (%d+) (%d+) (%d+)([ %d]*)$')
  if not version or capacity + 0 == 0 or per + 0 == 0 or interval + 0 == 0 then return false end
  p = {text = text, version = version + 0, kind = kind + 0, capacity = capacity + 0, tokens = tokens + 0, per = per + 0,
    interval = interval + 0, lacking = 0, on_loss = 0, on_rollback = 0, carry_over = 0, enforcement = 0, strict = 0,
    pools_version = 0, epoch = 0, seq = 0, grant_tokens = 0, grant_end = 0, grant_era = 0}
  if rest ~= '' then
    local names, n = fields(), 6
    for word in string.gmatch(rest, '%d+') do
      n = n + 1
      if n > #names then return false end
      p[names[n]] = word + 0
    end
  end
  p.stepped = p.kind == STEPPED or p.kind == BUDGET
  p.expires = p.kind == TEMPLATE or p.kind == BUDGET
  p.half = floor(p.interval / 2)
  -- The longest time that one refill credits: the time that fills the bucket, but no more than 2 s or five intervals.
  p.max_elapsed = min(math.ceil(p.capacity * p.per / p.tokens), max(2000000, 5 * p.interval))
  p.life_s = 1000000000 -- of a budget whose schedule isn't known
  if p.kind == TEMPLATE then
    -- The time after which a bucket expires once it was armed, and the number of refills after which that is checked.
    p.life_s = min(max(60, 2 * p.capacity * p.per / p.tokens / 1000000), p.life_s)
    p.refills_per_check = max(1, floor(p.life_s * 1000000 / (8 * p.interval)))
  end
  policies[text] = p
  return p
end
