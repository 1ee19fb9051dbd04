-- KEYS[1]: the sorted set of one key's admissions, scored by their time in microseconds.
-- ARGV: limit, window in seconds, a member that no other request has.
-- Answers {admitted (0 or 1), remaining, microseconds until the oldest admission leaves the window}.
local time = redis.call('TIME')
local now, window = time[1] * 1000000 + time[2], ARGV[2] * 1000000
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - window)
local left = ARGV[1] - redis.call('ZCARD', KEYS[1])
if left <= 0 then
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return { 0, 0, oldest[2] + window - now }
end
redis.call('ZADD', KEYS[1], now, ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2] + 1)
return { 1, left - 1, window }
