-- Packs an instance's index anew at or past the stored version; followers need not know, for changes are idempotent.
-- KEYS state, stream, added. ARGV incarnation, agent_epoch, version, hashes, tiers. Answers {1} or {0}.
local stored = sure('hash', 'HMGET', KEYS[1], 'incarnation', 'agent_epoch', 'version', 'snapshot_version')
if stored[1] ~= ARGV[1] or stored[2] ~= ARGV[2] then return {0} end
if less(ARGV[3], stored[3]) or less(ARGV[3], stored[4]) then return {0} end
local last = sure('stream', 'XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local position = '0-0'
if last[1] then position = last[1][1] end
redis.call('HSET', KEYS[1], 'snapshot_hashes', ARGV[4], 'snapshot_tiers', ARGV[5], 'snapshot_version', ARGV[3],
  'snapshot_position', position, 'snapshot_added', sure('string', 'GET', KEYS[3]) or '0')
return {1}
