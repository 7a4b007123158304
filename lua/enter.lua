-- enter: puts a bucket in the active set of its template. Where both share a slot, taketemplate does it.
--
-- KEYS  1 the shard of the set
-- ARGV  1 the bucket's name
--       2 till_s: when the bucket expires
-- Reply 1 if it wasn't there, 0 if it was
--#include expiry
return enter_set(KEYS[1], ARGV[1], tonumber(ARGV[2]))
