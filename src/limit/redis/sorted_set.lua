-- A log as a sorted set: score = microseconds of this server's clock, one member an entry. A member is recorded once
-- however often its request is repeated. Costs about 120 bytes an entry past 128 entries.
--
-- If the clock was set back, what was recorded before lies in the future and still counts: nothing is admitted too much.

local call, format = redis.call, string.format

local time = call('TIME')
local clock = time[1] * 1000000 + time[2]

-- The score of the entry at this rank, the oldest being 0 and the newest -1; nil where there is none.
local function score(key, rank)
  local found = call('ZRANGE', key, rank, rank, 'WITHSCORES')[2]
  return found and tonumber(found)
end

-- A log goes a second after its newest entry has left the longest window.
local function expire(log, newest)
  call('PEXPIRE', log.key, format('%.0f', math.ceil((newest + log.longest - clock) / 1000) + 1000))
end

-- A log that was kept as a list, while the limits were other ones, goes on as a sorted set.
local function adopt(key, longest)
  local times = call('LRANGE', key, 0, -1)
  call('DEL', key)
  for i = 1, #times do call('ZADD', key, times[i], format('%s:%08x', times[i], i)) end
  expire({ key = key, longest = longest }, tonumber(times[1]))
end

-- A log without what no window holds any more; nil where no limit looks at it. The members of the requests stand in
-- ARGV behind the `numbers` first ones.
local function open(key, longest, numbers)
  if longest == 0 then return nil end
  local first = redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first.err then
    adopt(key, longest)
    first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  end
  local oldest = first[2] and tonumber(first[2])
  if oldest and oldest <= clock - longest then
    call('ZREMRANGEBYSCORE', key, '-inf', format('%.0f', clock - longest))
    oldest = nil
  end
  local log = { key = key, longest = longest, size = call('ZCARD', key), oldest = oldest, recorded = 0 }
  if ARGV[1] == '1' then
    for i = numbers + 1, #ARGV do
      if call('ZSCORE', key, ARGV[i]) then log.recorded = log.recorded + 1 end
    end
  end
  return log
end

-- How many entries lie in a window.
local function count(log, window)
  if window == log.longest or log.size == 0 then return log.size end
  return call('ZCOUNT', log.key, format('(%.0f', clock - window), '+inf')
end

-- When the entry at this rank was recorded.
local function at(log, rank)
  if rank == 0 and log.oldest then return log.oldest end
  return score(log.key, rank)
end

-- Records the requests whose members are ARGV[first] to ARGV[last].
local function record(log, first, last)
  local now = format('%.0f', clock)
  for i = first, last do call('ZADD', log.key, now, ARGV[i]) end
  expire(log, clock)
  log.oldest = log.oldest or log.size == 0 and clock or nil
  log.size = log.size + last - first + 1
end

local function keep_newest(log, most)
  call('ZREMRANGEBYRANK', log.key, 0, log.size - most - 1)
  log.size, log.oldest = most, nil
end

-- Entries from the future count as made now, so that nobody waits longer than a window after the clock was set back.
local function pull_back(log)
  local newest = score(log.key, -1)
  if newest and newest > clock then
    local now = format('%.0f', clock)
    for _, future in ipairs(call('ZRANGEBYSCORE', log.key, '(' .. now, '+inf')) do
      call('ZADD', log.key, 'XX', now, future)
    end
    log.oldest = nil
  end
end
