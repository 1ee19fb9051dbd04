-- Tells of the pauses that providers want, and of those that others were told of.
--
-- KEYS[1]  the pauses: a sorted set, score = microseconds of this server's clock at the end
-- ARGV     a name and how long it still wants to be left alone, in microseconds; so for each
--
-- Answers a name and what is left of its pause, so for each.

local format = string.format
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', format('%.0f', now))
for i = 1, #ARGV, 2 do
  local ending = now + tonumber(ARGV[i + 1])
  local known = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if not known or tonumber(known) < ending then
    redis.call('ZADD', KEYS[1], format('%.0f', ending), ARGV[i])
  end
end
local pauses = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 2, #pauses, 2 do
  pauses[i] = format('%.0f', tonumber(pauses[i]) - now)
end
if #pauses > 0 then
  redis.call('PEXPIRE', KEYS[1], format('%.0f', pauses[#pauses] / 1000 + 1000))
end
return pauses
