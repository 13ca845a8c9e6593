-- Lengthens a lease still held: KEYS lease. ARGV owner, fencing epoch, ttl_ms. Answers {1} or {0}.
if sure('string', 'GET', KEYS[1]) ~= ARGV[2] .. ' ' .. ARGV[1] then return {0} end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1}
