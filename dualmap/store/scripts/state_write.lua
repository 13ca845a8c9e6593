-- Stores poll results of one shard's instances and tells the followers, each by itself: taken or refused.
-- KEYS stream, added, instances, then the state of each.
-- ARGV stream length, then for each: instance, 'incarnation agent_epoch since version digest blocks full changed',
--      load ('' unchanged), entry, snapshot hashes, snapshot tiers.
-- Answers for each: 1, entries the packed snapshot lies behind, '', '' | 0, stored incarnation, agent_epoch, version
-- ('' none).
local before = tonumber(sure('string', 'GET', KEYS[2]) or '0') or 0
local now_ms
local written = 0
local answers = {}

local function write(state, first)
  local instance, load = ARGV[first], ARGV[first + 2]
  local incarnation, agent_epoch, since, version, digest, blocks, full, changed =
    string.match(ARGV[first + 1], '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([01]) ([01])$')
  full, changed = full == '1', changed == '1'
  local stored = sure('hash', 'HMGET', state, 'incarnation', 'agent_epoch', 'version', 'snapshot_version',
    'snapshot_added', 'reachable')
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
  if not taken then return 0, stored[1] or '', stored[2] or '', stored[3] or '' end

  if not now_ms then
    local now = redis.call('TIME')
    now_ms = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
  end
  local position = sure('stream', 'XADD', KEYS[1], 'MAXLEN', ARGV[1], '*', 'i', instance, 'e', ARGV[first + 3])
  written = written + 1
  local added = before + written
  local fields = {'version', version, 'kv_digest', digest, 'kv_blocks', blocks, 'written_at_ms', now_ms}
  local function set(name, value)
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  if full then
    sure('set', 'SADD', KEYS[3], instance)
    set('f', '1')
    set('incarnation', incarnation)
    set('agent_epoch', agent_epoch)
    set('snapshot_hashes', ARGV[first + 4])
    set('snapshot_tiers', ARGV[first + 5])
  end
  if stored[6] ~= '1' then set('reachable', '1') end
  if load ~= '' then set('load', load) end
  -- A snapshot at or past this version, or one that nothing changed since, needs no entry up to here any more.
  local covers = full or not less(stored[4], version) or (not changed and not less(stored[4], stored[3]))
  local behind = 0
  if covers then
    if full or less(stored[4], version) then set('snapshot_version', version) end
    set('snapshot_position', position)
    set('snapshot_added', string.format('%.0f', added))
  else
    behind = added - (tonumber(stored[5] or '0') or 0)
  end
  redis.call('HSET', state, unpack(fields))
  return 1, string.format('%.0f', behind), '', ''
end

for number = 4, #KEYS do
  local at = #answers
  answers[at + 1], answers[at + 2], answers[at + 3], answers[at + 4] = write(KEYS[number], 2 + (number - 4) * 6)
end
if written > 0 then redis.call('SET', KEYS[2], string.format('%.0f', before + written)) end
return answers
