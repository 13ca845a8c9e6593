-- What every script may use; it is put before each.
-- Numbers beyond 2^53 are decimal text: Lua's own would lose digits.
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
-- A command on a key that shall be of this kind. Of another, it is damage and not data: it goes, and who knows what
-- was there is asked again.
local function sure(kind, command, key, ...)
  local answer = redis.pcall(command, key, ...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  local found = redis.call('TYPE', key).ok
  if found == 'none' or found == kind then error(answer.err) end
  redis.call('DEL', key)
  return redis.call(command, key, ...)
end
