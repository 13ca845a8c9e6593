-- Reads a ring with its age: KEYS ring, epochs. Answers {1, snapshot, age_ms, epoch, position} or {0, nil, 0, 0, position}.
local last = sure('stream', 'XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local position = '0-0'
if last[1] then position = last[1][1] end
local stored = sure('hash', 'HMGET', KEYS[1], 'snapshot', 'published_at_ms', 'epoch')
if not stored[1] then return {0, false, '0', '0', position} end
local now = redis.call('TIME')
local age_ms = now[1] * 1000 + math.floor(now[2] / 1000) - tonumber(stored[2] or '0')
if age_ms < 0 then age_ms = 0 end
return {1, stored[1], string.format('%.0f', age_ms), stored[3], position}
