-- Shared by the scripts that read a bucket's policy. A script's line "--#include shared/policy" is replaced
-- by this file.
-- pol is a text of decimal integers with a space between, in the order of fields, without the zeros at the end from the
-- seventh on.
-- kind: 0 plain, 1 stepped, 2 of a template, 3 of a pool, 4 a budget: stepped and of a template. per: µs; of a stepped
-- policy a name of its schedule.
-- interval, grant_end: µs. lacking: capacity less what a new bucket holds. enforcement: what consumers do about it, how
-- they degrade, and 4 more in shadow mode, and 8 more if the bucket has flows.
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

-- policy reads pol, each text once; false if it can't be read.
local function policy(text)
  local p = policies[text]
  if p ~= nil then return p end
  policies[text] = false
  local version, kind, capacity, tokens, per, interval, rest =
    match(text, '^(%d+) ([0-4]) (%d+) (%d+) (%d+) (%d+)([ %d]*)$')
  if not version or capacity + 0 == 0 or per + 0 == 0 or interval + 0 == 0 then return false end
  p = {text = text, version = version + 0, kind = kind + 0, capacity = capacity + 0, tokens = tokens + 0, per = per + 0,
    interval = interval + 0, lacking = 0, on_loss = 0, on_rollback = 0, carry_over = 0, enforcement = 0, strict = 0,
    pools_version = 0, epoch = 0, seq = 0, grant_tokens = 0, grant_end = 0, grant_era = 0, half = 0, max_elapsed = 0}
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
  -- The longest stretch that one refill credits: what fills the bucket, but no more than 2 s or five intervals.
  p.max_elapsed = min(math.ceil(p.capacity * p.per / p.tokens), max(2000000, 5 * p.interval))
  p.life_s = 1000000000 -- of a budget whose schedule isn't known
  if p.kind == TEMPLATE then
    -- How long a bucket lives at least after it was armed, and after how many refills its expiry is checked.
    p.life_s = min(max(60, 2 * p.capacity * p.per / p.tokens / 1000000), p.life_s)
    p.refills_per_check = max(1, floor(p.life_s * 1000000 / (8 * p.interval)))
  end
  policies[text] = p
  return p
end
