-- Shared by the scripts that read a bucket's policy; the build puts it where a script says "--#include policy".
-- pol is a text of decimal integers with a space between:
--   version kind capacity tokens per interval_us, and then, less the zeros at the end: lacking on_loss on_rollback carry_over
--   enforcement strict pools_version epoch seq grant_tokens grant_end_us grant_era
-- kind: 0 plain, 1 stepped, 2 of a template, 3 of a pool. per: µs; of a stepped policy the name of its schedule. lacking: capacity
-- less what a new bucket holds. enforcement: what consumers do about it: how they degrade, and 4 more in shadow mode.
local STEPPED, TEMPLATE, POOL = 1, 2, 3
local call, pcall, find, format, match, sub = redis.call, redis.pcall, string.find, string.format, string.match, string.sub
local floor, max, min = math.floor, math.max, math.min
local EXACT = 9007199254740992 -- 2^53
local OPTIONAL = {'lacking', 'on_loss', 'on_rollback', 'carry_over', 'enforcement', 'strict', 'pools_version', 'epoch', 'seq', 'grant_tokens', 'grant_end', 'grant_era'}
local policies = {}

-- policy reads pol, each text once; false if it can't be read.
local function policy(text)
  local p = policies[text]
  if p ~= nil then return p end
  local version, kind, capacity, tokens, per, interval, rest = match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)([ %d]*)$')
  policies[text] = false
  if not version or kind + 0 > POOL or capacity + 0 == 0 or per + 0 == 0 or interval + 0 == 0 then return false end
  p = {text = text, version = version + 0, kind = kind + 0, capacity = capacity + 0, tokens = tokens + 0, per = per + 0, interval = interval + 0,
    half = floor(interval / 2), lacking = 0, on_loss = 0, on_rollback = 0, carry_over = 0, enforcement = 0, strict = 0,
    pools_version = 0, epoch = 0, seq = 0, grant_tokens = 0, grant_end = 0, grant_era = 0}
  -- The longest stretch that one refill credits: what fills the bucket, but no more than 2 s or five intervals.
  p.max_elapsed = floor(min(capacity * per / tokens, max(2000000, 5 * interval)))
  local n = 0
  for word in string.gmatch(rest, '%d+') do
    n = n + 1
    p[OPTIONAL[n] or 'more'] = word + 0
  end
  if p.more then return false end
  if p.kind == TEMPLATE then
    p.life_s = min(max(60, 2 * capacity * per / tokens / 1000000), 1000000000) -- how long a bucket lives at least after it was armed
    p.looks = max(1, floor(p.life_s * 1000000 / (8 * interval))) -- after so many refills that is looked at
  end
  policies[text] = p
  return p
end
