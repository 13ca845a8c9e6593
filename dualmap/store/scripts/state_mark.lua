-- Says that an instance can or cannot be reached, unless another collector has moved it on meanwhile.
-- KEYS state, stream, added. ARGV instance, incarnation, agent_epoch, version, reachable, stream length.
-- Answers {1 said | 2 said before | 0 base moved}.
local stored = sure('hash', 'HMGET', KEYS[1], 'incarnation', 'agent_epoch', 'version', 'reachable')
if stored[1] ~= ARGV[2] or stored[2] ~= ARGV[3] or stored[3] ~= ARGV[4] then return {0} end
if stored[4] == ARGV[5] then return {2} end
redis.call('HSET', KEYS[1], 'reachable', ARGV[5])
sure('stream', 'XADD', KEYS[2], 'MAXLEN', ARGV[6], '*', 'i', ARGV[1], 'r', ARGV[5])
sure('string', 'INCR', KEYS[3])
return {1}
