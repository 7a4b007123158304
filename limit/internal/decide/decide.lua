-- decide: asks limits for tokens and takes from all of them or from none.
--
-- KEYS  one for each limit
-- ARGV  1 what to do: 1 take, 0 peek, -1 return
--       2 n: tokens, at least 1
--       then five for each limit: the name of its rule, the rule's three numbers, and, for a return, the window from
--       which the tokens are, 0 if that is not known
-- Reply {1, now_us, ...}: taken, peeked or returned
--       {0, now_us, ...}: denied; nothing is taken from any limit
--       both with six integers for each limit: 1 if n tokens fit, else 0; tokens left; wait_us until n tokens fit;
--       reset_us until nothing needs to be stored; delay_us before the tokens may be used; more_us until there are more
--       tokens than are left, 0 if all are there
--       {3, i}: KEYS i holds something else; nothing is taken
--       {4, now_us}: the present window of the calendar is not the one in the numbers; nothing is taken
--
-- A rule is a function of key, what, n, now, its three numbers and the window. It reads its key, and writes nothing. It
-- returns whether n tokens fit; the tokens left, wait_us, reset_us, delay_us and more_us before this call; and a
-- function that writes, and returns tokens left, reset_us and more_us after the call. It returns nil if the key holds
-- something else. It returns nil, true if the present window of the calendar is not the one in its numbers. The
-- functions that write are called after every rule has read. Rules may use the functions of redis and ahead.
--#include shared/redis
--#include shared/ahead
--#include shared/unwritten
local rules = {}
--#rules
local function number(i) return tonumber(ARGV[i]) end
local now = now_us()
local what, n = number(1), number(2)
local reply = {1, now}
local writes = {}
local granted = true
for i, key in ipairs(KEYS) do
  local a = 5 * i - 2
  local fits, left, wait, reset, delay, more, write =
    rules[ARGV[a]](key, what, n, now, number(a + 1), number(a + 2), number(a + 3), number(a + 4))
  if fits == nil then return left and {4, now} or {3, i} end
  fits = fits or what == -1
  granted = granted and fits
  local r = 6 * i - 3
  reply[r] = fits and 1 or 0
  reply[r + 1] = left
  reply[r + 2] = fits and 0 or wait
  reply[r + 3], reply[r + 4] = reset, delay
  reply[r + 5] = more
  writes[i] = write
end
if what == 0 then return reply end
if what == 1 and not granted then
  reply[1] = 0
  return unwritten(KEYS[1], reply)
end
for i, write in ipairs(writes) do
  local r = 6 * i - 3
  reply[r + 1], reply[r + 3], reply[r + 5] = write()
end
return reply
