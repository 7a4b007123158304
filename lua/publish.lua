-- publish: publishes a set of templates for consumers, unless a later one is published.
--
-- KEYS  1 the published set: a hash with fields version, id and text; earlier is the text of the set that it replaced
-- ARGV  1 version: of the configuration that the set is from
--       2 id: a hash of the text
--       3 text: the set, as package policy encodes it
-- Reply {1, version}: the set is now the published one; version is that of the set before, -1 if there was none
--       {0, version}: a set with a later version, or another set with the same version, stays published; version is
--           its version
--       {3, 1}: KEYS 1 holds something else
--#include shared/redis
local there = redis.pcall('HMGET', KEYS[1], 'version', 'id', 'text')
if there.err then
  wrong_type(there)
  return {3, 1}
end
local version, before = tonumber(ARGV[1]), tonumber(there[1] or '-1')
if not before then return {3, 1} end
if before > version or (before == version and there[2] ~= ARGV[2]) then return {0, before} end
if before < version or there[2] ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'version', ARGV[1], 'id', ARGV[2], 'text', ARGV[3], 'earlier', there[3] or '')
end
return {1, before}
