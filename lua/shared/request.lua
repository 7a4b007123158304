-- Shared by the scripts of takes that are charged once for a request.
--
-- {K}:req:<id> holds what the request asked for and got, with a space between. ONCE is the pattern of one take: n
-- count leave taken left era. ALL is that of a take of several buckets: a name for what it asked for, and of each
-- bucket fits, left and era. An id whose text is of the other kind was reused.
local ONCE = '^(%d+ %d+ %d+%%?) (%d+) (%d+) (%d+)$'
local ALL = '^(' .. string.rep('%x', 40) .. ')([ %d-]+)$'
