-- Decides on one request and records it, atomically.
--
-- KEYS[1]  log of admissions: a sorted set, score = microseconds of this server's clock, one member an admission
-- KEYS[2]  log of attempts, of the same form; touched only by limits that count refusals
-- ARGV[1]  member of this request, the same again when the request is repeated after a lost answer
-- ARGV[2]  "1" if this is such a repetition, else "0"
-- ARGV[3]  the longest window of the limits that look at admissions, in microseconds; 0: there are none
-- ARGV[4]  the longest window of the limits that look at attempts; 0: there are none
-- ARGV[5]  the largest number of attempts that one of those allows
-- ARGV[6…] for each limit: requests allowed, window in microseconds, "1" if it counts refusals else "0"
--
-- Returns {admitted 0|1, then for each limit: remaining, microseconds to its reset, microseconds to wait (0: has room)}.
--
-- A window is half-open, (now - W, now]. All plain limits record the same admissions, so they share a log. Every number
-- of microseconds that goes into a command is written with %.0f, for Lua's own conversion keeps only 14 digits.
--
-- If the clock was set back, what was recorded before lies in the future and still counts: nothing is admitted too much.

local call, format, max = redis.call, string.format, math.max

local member, repeated = ARGV[1], ARGV[2] == '1'
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- The score of the entry at this rank, the oldest being 0 and the newest -1; nil where there is none.
local function score_at(key, rank)
  local score = call('ZRANGE', key, rank, rank, 'WITHSCORES')[2]
  return score and tonumber(score)
end

-- A log without what no window holds any more; nil where no limit looks at it.
local function open(key, longest)
  if longest == 0 then return nil end
  local oldest = score_at(key, 0)
  if oldest and oldest <= now - longest then
    call('ZREMRANGEBYSCORE', key, '-inf', format('%.0f', now - longest))
    oldest = nil
  end
  local has_member = repeated and call('ZSCORE', key, member) ~= false
  return { key = key, longest = longest, size = call('ZCARD', key), oldest = oldest, has_member = has_member }
end

local function record(log)
  if log.has_member then return end
  call('ZADD', log.key, format('%.0f', now), member)
  call('PEXPIRE', log.key, format('%.0f', math.ceil(log.longest / 1000) + 1000))
  log.size, log.has_member = log.size + 1, true
end

-- How many entries lie in a window.
local function count(log, window)
  if window == log.longest or log.size == 0 then return log.size end
  return call('ZCOUNT', log.key, format('(%.0f', now - window), '+inf')
end

-- Entries from the future count as made now, so that nobody waits longer than a window after the clock was set back.
local function pull_back(log)
  local newest = score_at(log.key, -1)
  if newest and newest > now then
    for _, future in ipairs(call('ZRANGEBYSCORE', log.key, format('(%.0f', now), '+inf')) do
      call('ZADD', log.key, 'XX', format('%.0f', now), future)
    end
  end
end

local admissions, attempts = open(KEYS[1], tonumber(ARGV[3])), open(KEYS[2], tonumber(ARGV[4]))

local admitted = true
for i = 6, #ARGV, 3 do
  local log = ARGV[i + 2] == '1' and attempts or admissions
  -- A repetition is in its log already, and one that was admitted stays so.
  local own = log.has_member and 0 or 1
  local full = count(log, tonumber(ARGV[i + 1])) + own > tonumber(ARGV[i])
  if full and not (log.has_member and log == admissions) then admitted = false end
end

if admissions and admitted then record(admissions) end
if attempts then
  record(attempts)
  -- Older attempts than these can't change any answer, and a hammering caller must not cost memory.
  local surplus = attempts.size - tonumber(ARGV[5])
  if surplus > 0 then
    call('ZREMRANGEBYRANK', attempts.key, 0, surplus - 1)
    attempts.size, attempts.oldest = attempts.size - surplus, nil
  end
end
if not admitted then
  if admissions then pull_back(admissions) end
  if attempts then pull_back(attempts) end
end

-- Judged after recording, for a refused attempt may itself be what fills a limit that counts it.
local reply = { admitted and 1 or 0 }
for i = 6, #ARGV, 3 do
  local log = ARGV[i + 2] == '1' and attempts or admissions
  local allowed, window = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  local used = count(log, window)
  local reset, wait = 0, 0
  if not admitted and used >= allowed then
    -- Room comes when the entry at rank n - allowed leaves, not always the oldest: limits can be lowered.
    wait = max(1, score_at(log.key, log.size - allowed) + window - now)
    reset = wait
  elseif used == log.size and log.oldest then
    reset = max(0, log.oldest + window - now)
  elseif used > 0 then
    reset = max(0, score_at(log.key, log.size - used) + window - now)
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = max(0, allowed - used), reset, wait
end
return reply
