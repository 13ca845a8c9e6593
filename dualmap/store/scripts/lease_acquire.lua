-- Takes a free lease, or the caller's own anew: KEYS lease, fence. ARGV owner, ttl_ms.
-- Answers {1, fencing epoch, owner} or {0, holder's fencing epoch, holder}.
local held = sure('string', 'GET', KEYS[1])
if held then
  -- What names nobody or never ends is damage: nobody would lead again.
  local epoch, owner = string.match(held, '^(%d+) (.*)$')
  if owner and owner ~= ARGV[1] and redis.call('PTTL', KEYS[1]) >= 0 then return {0, epoch, owner} end
end
-- The server's clock joins in so that a server that lost its data gives no epoch twice.
local now = redis.call('TIME')
local epoch = math.max((tonumber(sure('string', 'GET', KEYS[2]) or '0') or 0) + 1, now[1] * 1000 + math.floor(now[2] / 1000))
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], text .. ' ' .. ARGV[1], 'PX', ARGV[2])
return {1, text, ARGV[1]}
