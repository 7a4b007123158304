-- Shared by the scripts that may reply without a write.
--
-- unwritten returns such a reply, or the error of a server that refuses all writes: an old master (READONLY), a master
-- without its replicas (NOREPLICAS), or one without a disk (MISCONF). The data of the first two may be out of date, and
-- none of them can be refilled. The command deletes nothing, whatever the key holds. It comes last: a server without
-- memory refuses the first write of a script, and no later one.
local function unwritten(key, reply)
  local deleted = redis.pcall('HDEL', key, '')
  if type(deleted) ~= 'table' then return reply end
  for _, refusal in ipairs({'READONLY', 'NOREPLICAS', 'MISCONF'}) do
    if string.find(deleted.err, refusal) then return deleted end
  end
  return reply
end
