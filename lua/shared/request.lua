-- Shared by the scripts of takes that are charged once for a request.
--
-- {K}:req:<id> holds what the request asked for and what it got, as words with a space between. ONCE is the pattern of
-- one take: n, count, leave, taken, left, era, paid as in flows, and the flow after a slash. ALL is the pattern of a
-- take from several buckets: a hash of the demands, and then fits, left, era and paid of each bucket. If the text
-- matches the pattern of the other kind of take, the id was reused.
local ONCE = '^(%d+ %d+ %d+%%?) (%d+) (%d+) (%d+) (%d+) /(.*)$'
local ALL = '^(' .. string.rep('%x', 40) .. ')([ %d-]+)$'
