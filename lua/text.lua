-- Shared by the scripts that tell a take that fits the policy: its text alone, at a quarter of what reading it costs; the build
-- puts it where a script says "--#include text".
--
-- policy_text answers the text of the policy in the hash at key: '' if the key is missing, false if it doesn't hold a bucket's
-- state (see state.lua), the error of any other failure. A pool's grant that isn't in force has grant_era 0.
local function policy_text(key)
  local c = redis.pcall('HMGET', key, 'st', 'pol')
  if c.err then return not string.find(c.err, 'WRONGTYPE', 1, true) and c end
  local st, pol = c[1], c[2]
  if not st and not pol then return '' end
  local era = st and string.match(st, '^%d+ %d+ %d+ (%d+)[ %d]*#?%w*$')
  if not era or not pol or not string.find(pol, '^%d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+[ %d]*$') then return false end
  local ends, grant = string.match(pol, '^%d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ (%d+) (%d+)')
  if not grant or grant == '0' then return pol end
  local t = redis.call('TIME')
  if grant == era and t[1] * 1000000 + t[2] < tonumber(ends) then return pol end
  return (string.gsub(pol, '^(' .. string.rep('%d+ ', 15) .. ')%d+', '%10'))
end
