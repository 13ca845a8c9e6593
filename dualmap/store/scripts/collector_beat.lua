-- Registers a collector for ttl_ms by the server's clock: KEYS collectors. ARGV id, ttl_ms (0: leave).
-- Answers {1, live ids...}.
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
sure('zset', 'ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_ms))
-- No registration is longer than a minute: beyond it the clock has been set back, and the dead would keep their shares.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now_ms + 60000), '+inf')
if ARGV[2] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + tonumber(ARGV[2])), ARGV[1])
end
local answer = {1}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do answer[#answer + 1] = id end
return answer
