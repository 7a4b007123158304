-- Shared by the scripts of takes that are charged once for a request.
--
-- {K}:req:<id> holds what the request asked for and got, with a space between. ONCE is the pattern of one take: n
-- count leave taken left era paid, with paid as in flows, and the flow behind a slash. ALL is that of a take of several
-- buckets: a hash of the demands, then fits, left, era and paid of each bucket. If the text matches the other pattern,
-- the id was reused.
local ONCE = '^(%d+ %d+ %d+%%?) (%d+) (%d+) (%d+) (%d+) /(.*)$'
local ALL = '^(' .. string.rep('%x', 40) .. ')([ %d-]+)$'
