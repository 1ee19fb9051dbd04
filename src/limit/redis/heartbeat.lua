-- Says that a process is there, and counts those that are.
--
-- KEYS[1]  the processes: a sorted set, score = microseconds of this server's clock at the last beat
-- ARGV[1]  the name of the process that beats
-- ARGV[2]  how long a beat counts, in microseconds
--
-- Beats from the future are of no use after the clock was set back; who is there beats again.

local format = string.format
local time = redis.call('TIME')
local now, fresh = time[1] * 1000000 + time[2], tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', format('%.0f', now - fresh))
redis.call('ZREMRANGEBYSCORE', KEYS[1], format('(%.0f', now), '+inf')
redis.call('ZADD', KEYS[1], format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], format('%.0f', fresh / 1000))
return redis.call('ZCARD', KEYS[1])
