-- Shared by the scripts that tell a take that fits the policy: its text alone, at a quarter of what reading it costs; the build
-- puts it where a script says "--#include text".
--
-- policy_text answers the text of the policy in the hash at key: '' if the key is missing, false if it doesn't hold a bucket's
-- state (see state.lua), the error of any other failure.
local function policy_text(key)
  local c = redis.pcall('HMGET', key, 'st', 'pol')
  if c.err then return not string.find(c.err, 'WRONGTYPE', 1, true) and c end
  local st, pol = c[1], c[2]
  if not st and not pol then return '' end
  return st and pol and string.find(st, '^%d+ %d+ %d+ %d+ %d+ %d+$') and
    string.find(pol, '^%d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+ %d+$') and pol or false
end

