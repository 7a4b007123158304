-- ticket: where a pool's bucket stands, for the report on which the next grant is founded. Writes nothing.
--
-- KEYS  1 K, 2 {K}, 3 {K}:ctl, as in take
-- ARGV  none
-- Reply {1, now_us, era, index, epoch, seq, tokens, added, denied}; added and denied are texts: tokens added by refills and denied
--       by takes since the bucket began to count them. era is 0 if the bucket has no state
--       {3, k}: KEYS k holds something else
--#include state
local now = now_us()
local tokens = get(KEYS[1])
if tokens == false then return {3, 1} end
local index = get(KEYS[2])
if index == false then return {3, 2} end
local s, p = read_ctl(KEYS[3])
if s == false then return {3, 3} end
if not s then return {1, now, 0, index or 0, 0, 0, tokens or 0, '0', '0'} end
local counts = redis.call('HMGET', KEYS[3], 'added', 'denied')
return {1, now, s.era, index or s.index, p.epoch, p.seq, tokens or 0, counts[1] or '0', counts[2] or '0'}
