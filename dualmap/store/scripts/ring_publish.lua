-- Publishes a ring: KEYS ring, epochs. ARGV fencing_epoch, expected_epoch ('' any), epoch, snapshot, stream length.
-- Answers {1 published | 2 fenced | 3 epoch moved | 4 epoch does not rise, stored epoch, stored fencing epoch}.
local stored = sure('hash', 'HMGET', KEYS[1], 'epoch', 'fencing_epoch')
local epoch = stored[1] or '0'
local fencing = stored[2] or '0'
if less(ARGV[1], fencing) then return {2, epoch, fencing} end
if ARGV[2] ~= '' and ARGV[2] ~= epoch then return {3, epoch, fencing} end
if not less(epoch, ARGV[3]) then return {4, epoch, fencing} end
local now = redis.call('TIME')
local now_ms = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('HSET', KEYS[1], 'epoch', ARGV[3], 'fencing_epoch', ARGV[1], 'published_at_ms', now_ms, 'snapshot', ARGV[4])
sure('stream', 'XADD', KEYS[2], 'MAXLEN', ARGV[5], '*', 'epoch', ARGV[3])
return {1, ARGV[3], ARGV[1]}
