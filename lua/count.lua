-- count: notes that the expiry of one of a template's buckets has moved, and tells how many buckets of the template are alive.
-- Where both share a slot, taketemplate does it.
--
-- KEYS  1 the count of the template's buckets alive
-- ARGV  1 was_s, 2 till_s: from which instant to which; 0 for none; both 0 to be told only
-- Reply the number of buckets alive
--#include state
--#include expiry
local now = now_us()
count(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), now)
return alive(KEYS[1], now)
