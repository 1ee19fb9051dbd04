-- A log as a list of times, in microseconds of this server's clock, the newest first. Costs 10 to 13 bytes an entry.
-- It knows no members, so a request whose answer was lost can't be repeated: nobody could tell whether it was recorded.
--
-- Times never decrease from one entry to the next. After a clock was set back a little, what is recorded carries the time
-- of the newest entry until the clock has caught up; after a large step, entries from the future count as made now.

local call, format = redis.call, string.format

-- A step back of the clock up to this, in microseconds, is waited for.
local STEP_TOLERATED = 1000000

-- So many values go into one command.
local CHUNK = 1000

local time = call('TIME')
local clock = time[1] * 1000000 + time[2]

-- A log goes a second after its newest entry has left the longest window.
local function expire(log, newest)
  call('PEXPIRE', log.key, format('%.0f', math.ceil((newest + log.longest - clock) / 1000) + 1000))
end

-- Adds `values` to the log by LPUSH or RPUSH.
local function push(command, log, values)
  for first = 1, #values, CHUNK do
    call(command, log.key, unpack(values, first, math.min(first + CHUNK - 1, #values)))
  end
  expire(log, log.now)
end

local function pull_back(log)
  if log.size > 0 and log.now > clock + STEP_TOLERATED then
    local times, now = call('LRANGE', log.key, 0, -1), format('%.0f', clock)
    for i = 1, #times do
      if tonumber(times[i]) <= clock then break end
      times[i] = now
    end
    call('DEL', log.key)
    log.now, log.oldest = clock, tonumber(times[#times])
    push('RPUSH', log, times)
  end
end

-- A log that was kept as a sorted set, while the limits were other ones, goes on as a list.
local function adopt(log)
  local entries, times = call('ZRANGE', log.key, 0, -1, 'WITHSCORES'), {}
  for i = #entries, 2, -2 do times[#times + 1] = format('%.0f', tonumber(entries[i])) end
  call('DEL', log.key)
  log.size, log.now = #times, tonumber(times[1])
  push('RPUSH', log, times)
end

-- How many entries are newer than this, by halving.
local function newer(log, moment)
  local low, high = 0, log.size
  while low < high do
    local middle = math.floor((low + high) / 2)
    if tonumber(call('LINDEX', log.key, middle)) > moment then low = middle + 1 else high = middle end
  end
  return low
end

-- A log without what no window holds any more; nil where no limit looks at it.
local function open(key, longest, numbers)
  if longest == 0 then return nil end
  local log = { key = key, longest = longest, size = redis.pcall('LLEN', key), now = clock, recorded = 0 }
  if type(log.size) == 'table' then adopt(log) end
  if log.size > 0 then
    log.now = math.max(clock, tonumber(call('LINDEX', key, 0)))
    pull_back(log)
    log.oldest = tonumber(call('LINDEX', key, -1))
    if log.oldest <= log.now - longest then
      local left = newer(log, log.now - longest)
      if left == 0 then call('DEL', key) else call('LTRIM', key, 0, left - 1) end
      log.size, log.oldest = left, nil
    end
  end
  return log
end

-- How many entries lie in a window.
local function count(log, window)
  if window == log.longest or log.size == 0 then return log.size end
  return newer(log, log.now - window)
end

-- When the entry at this rank was recorded, the oldest being 0.
local function at(log, rank)
  if rank == 0 and log.oldest then return log.oldest end
  return tonumber(call('LINDEX', log.key, log.size - 1 - rank))
end

-- Records the requests whose members are ARGV[first] to ARGV[last].
local function record(log, first, last)
  local now, times = format('%.0f', log.now), {}
  for i = 1, last - first + 1 do times[i] = now end
  push('LPUSH', log, times)
  log.oldest = log.oldest or log.size == 0 and log.now or nil
  log.size = log.size + #times
end

local function keep_newest(log, most)
  call('LTRIM', log.key, 0, most - 1)
  log.size, log.oldest = most, nil
end
