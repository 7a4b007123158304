-- Shared by the scripts whose answer may be one for which nothing was written.
--
-- unwritten is such a reply, or the error of a server that may not write, such as an old master: what that holds is no
-- longer true. The command deletes nothing, whatever the key holds. It comes last: a server without memory refuses the
-- first write of a script, and no later one.
local function unwritten(key, reply)
  local deleted = redis.pcall('HDEL', key, '')
  if type(deleted) == 'table' and string.find(deleted.err, 'READONLY') then return deleted end
  return reply
end
