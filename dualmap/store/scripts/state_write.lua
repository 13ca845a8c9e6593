-- Stores one poll result and tells the followers, or refuses it. All or nothing.
-- KEYS state, stream, added, instances.
-- ARGV instance, incarnation, agent_epoch, since, version, full, load ('' unchanged), digest, blocks, changed,
--      snapshot hashes, snapshot tiers, stream length, entry.
-- Answers {1, entries the packed snapshot lies behind} or {0, stored incarnation, agent_epoch, version ('' none)}.
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local instance, incarnation, agent_epoch, since, version = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local full, changed = ARGV[6] == '1', ARGV[10] == '1'
local stored = redis.call('HMGET', KEYS[1], 'incarnation', 'agent_epoch', 'version', 'snapshot_version')
local known = stored[1] and stored[2] and stored[3] and stored[4]
local same_life = known and stored[1] == incarnation and stored[2] == agent_epoch
local taken
if full then
  taken = not known
    or less(stored[2], agent_epoch)
    or (stored[2] == agent_epoch and (stored[1] ~= incarnation or less(stored[3], version)))
else
  taken = same_life and stored[3] == since and not less(version, since)
end
if not taken then return {0, stored[1] or '', stored[2] or '', stored[3] or ''} end

local now = redis.call('TIME')
local fields = {
  'f', '1', 'incarnation', incarnation, 'agent_epoch', agent_epoch, 'version', version, 'kv_digest', ARGV[8],
  'kv_blocks', ARGV[9], 'reachable', '1', 'written_at_ms',
  string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000)),
}
local function set(name, value)
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
if ARGV[7] ~= '' then set('load', ARGV[7]) end
local position = redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[13], '*', 'i', instance, 'e', ARGV[14])
local added = redis.call('INCR', KEYS[3])
redis.call('SADD', KEYS[4], instance)
-- A snapshot at or past this version, or one that nothing changed since, needs no entry up to here any more.
local covers = full
if not full then
  covers = not less(stored[4], version) or (not changed and not less(stored[4], stored[3]))
end
local behind = 0
if full then
  set('snapshot_hashes', ARGV[11])
  set('snapshot_tiers', ARGV[12])
end
if covers then
  if full or less(stored[4], version) then set('snapshot_version', version) end
  set('snapshot_position', position)
  set('snapshot_added', tostring(added))
else
  behind = added - tonumber(redis.call('HGET', KEYS[1], 'snapshot_added') or '0')
end
redis.call('HSET', KEYS[1], unpack(fields))
return {1, behind}
