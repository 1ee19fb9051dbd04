-- Decides on requests of one caller and records them, atomically. Follows one of sorted_set.lua and list.lua, which know
-- how a log is kept, in the same script.
--
-- KEYS     the log of admissions, if a limit looks at it, then the log of attempts, if a limit counts refusals
-- ARGV[1]  "1" if these requests are repeated after a lost answer, else "0"
-- ARGV[2]  the longest window of the limits that look at admissions, in microseconds; 0: there are none
-- ARGV[3]  the longest window of the limits that look at attempts; 0: there are none
-- ARGV[4]  so many of the newest admissions are kept at most; 0: all that a window holds
-- ARGV[5]  so many of the newest attempts are kept at most
-- ARGV[6]  the number of limits
-- ARGV[7…] for each limit: requests allowed, window in microseconds, and the sum of 1 if it counts refusals and 2 if it
--          is not enforced
-- ARGV[…]  for each request a member, unique and the same again when it is repeated. Where a limit counts refusals or
--          is not enforced, there is one request only.
--
-- Returns {requests admitted, the first ones, then for each limit: remaining (below zero where more is used than allowed),
-- microseconds until the oldest request leaves its window, microseconds until it has room for one more (0: it has)}.
--
-- A window is half-open, (now - W, now]. All plain limits record the same admissions, so they share a log. Every number
-- of microseconds that goes into a command is written with %.0f, for Lua's own conversion keeps only 14 digits.

local numbers = 6 + 3 * tonumber(ARGV[6])
local requests = #ARGV - numbers
local admissions = open(KEYS[1], tonumber(ARGV[2]), numbers)
local attempts = open(KEYS[#KEYS], tonumber(ARGV[3]), numbers)

local function log_of(kind)
  return (kind == '1' or kind == '3') and attempts or admissions
end

-- Whoever is refused does not record, but the window can have grown since the newest entry was: a log must not expire
-- while requests are refused by what it holds.
local function keep(log)
  pull_back(log)
  if log.size > 0 then expire(log, at(log, log.size - 1)) end
end

-- A repetition is in its log already, and what was admitted stays so.
local before = admissions and admissions.recorded or 0
local admitted = requests
for i = 7, numbers, 3 do
  local kind = ARGV[i + 2]
  if kind < '2' then
    local log = log_of(kind)
    local room = tonumber(ARGV[i]) - count(log, tonumber(ARGV[i + 1])) + log.recorded
    if room < admitted then admitted = room end
  end
end
if admitted < before then admitted = before end

if admissions and admitted > before then
  record(admissions, numbers + before + 1, numbers + admitted)
  local most = tonumber(ARGV[4])
  if most > 0 and admissions.size > most then keep_newest(admissions, most) end
end
if attempts then
  if attempts.recorded == 0 then record(attempts, numbers + 1, numbers + 1) end
  -- Older attempts than these can't change any answer, and a hammering caller must not cost memory.
  local most = tonumber(ARGV[5])
  if attempts.size > most then keep_newest(attempts, most) end
end
if admitted < requests then
  if admissions then keep(admissions) end
  if attempts then pull_back(attempts) end
end

-- Judged after recording, for a refused attempt may itself be what fills a limit that counts it.
local reply = { admitted }
for i = 7, numbers, 3 do
  local allowed, window, log = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), log_of(ARGV[i + 2])
  local used = count(log, window)
  local oldest_leaves, wait = 0, 0
  if used > 0 then
    -- An entry from the future stays no longer than one made now: the first refusal makes it one.
    oldest_leaves = math.max(0, math.min(window, at(log, log.size - used) + window - clock))
  end
  if used >= allowed then
    -- Room comes when the entry at rank n - allowed leaves, not always the oldest: limits can be lowered.
    wait = math.max(1, at(log, log.size - allowed) + window - clock)
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = allowed - used, oldest_leaves, wait
end
return reply
