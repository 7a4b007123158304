-- add: the two-key refill of any client that shares only the token and index keys.
--
-- KEYS  1 K    tokens
--       2 {K}  index
-- ARGV  1 tokens to add
--       2 limit: most tokens the bucket holds
--       3 the index that the caller expects to find
-- Reply the index after the call: expected+1 to the winner, and also to the first loser; otherwise the stored
--       index.
--
-- Each index is won at most once in a history of Redis, so retries and duplicates change nothing. The reply does not
-- show whether this call added tokens. The reply of refill.lua does.
local index = redis.call('INCR', KEYS[2])
if index ~= tonumber(ARGV[3]) + 1 then
  return redis.call('DECR', KEYS[2])
end
if redis.call('INCRBY', KEYS[1], ARGV[1]) > tonumber(ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
end
return index
