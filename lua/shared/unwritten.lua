-- Shared by the scripts that may reply without a write.
--
-- unwritten returns the reply if the server accepts writes. Otherwise it returns the server's error. A server refuses
-- all writes if it is an old master (READONLY), a master without its replicas (NOREPLICAS), or one that can't write to
-- its disk (MISCONF). The data of the first two may be out of date, and none of them can be refilled.
--
-- To find out, unwritten sends a command that writes but deletes nothing, whatever the key holds. That is the last
-- command of the script: a server without memory refuses the first write of a script, and no later one.
local function unwritten(key, reply)
  local deleted = redis.pcall('HDEL', key, '')
  if type(deleted) ~= 'table' then return reply end
  for _, refusal in ipairs({'READONLY', 'NOREPLICAS', 'MISCONF'}) do
    if string.find(deleted.err, refusal) then return deleted end
  end
  return reply
end
