"""Scripts that Redis runs atomically: the rules of `limit_authority` and `ownership`, and the stream of links.

Redis expires and persists keys by itself, and a restart or a failover may lose the last writes without a trace. All
state therefore names the run id of the server process that holds it. Under another run id the state counts as lost.
"""

_HEAD = """
local prefix = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local function text(amount) return string.format('%.0f', amount) end
"""

EXCHANGE = (
    _HEAD
    + """
local holder, number, generation, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local state = redis.call('HMGET', prefix .. 'state', 'run_id', 'generation', 'built_ms')
if state[1] ~= run_id then
    if redis.call('SET', prefix .. 'rebuilding:' .. run_id, holder, 'NX', 'PX', ARGV[7]) then
        return cmsgpack.pack({0, false})
    end
    return cmsgpack.pack({-1, false})
end
if state[2] ~= generation then
    return cmsgpack.pack({tonumber(state[2]), false})
end
redis.call('SET', prefix .. 'live:' .. holder, '1', 'PX', ttl)
local last_key = prefix .. generation .. ':last:' .. holder
local last = redis.call('HMGET', last_key, 'number', 'answers')
if last[1] == number then
    return last[2]
end
local is_first, age = generation == '1', now - tonumber(state[3])

local function grant(left, need, want)
    if left <= 0 or want <= 0 then return 0 end
    return math.min(left, math.max(need, math.min(want, math.floor(left / 32))))
end

local function budget(key, ask)
    local settled, held, others, is_held, is_wanted = 0, 0, 0, false, 0
    local stored = redis.call('HGETALL', key)
    for i = 1, #stored, 2 do
        local amount = tonumber(stored[i + 1])
        local kind = string.sub(stored[i], 1, 1)
        if kind == 's' then settled = amount
        elseif kind == 'w' then
            if stored[i] ~= 'w' .. holder and now - amount < tonumber(ARGV[8]) then is_wanted = 1 end
        else
            is_held = true
            if stored[i] == 'h' .. holder then held = amount else others = others + amount end
        end
    end
    if not is_held then settled = math.max(settled, ask[4]) end
    settled = settled + ask[5]
    held = held - ask[5] - ask[6]
    local granted = grant(ask[3] - settled - others - held, ask[7], ask[8])
    held = held + granted
    redis.call('HSET', key, 's', text(settled))
    if held > 0 then redis.call('HSET', key, 'h' .. holder, text(held))
    else redis.call('HDEL', key, 'h' .. holder) end
    if granted < ask[7] then redis.call('HSET', key, 'w' .. holder, text(now))
    else redis.call('HDEL', key, 'w' .. holder) end
    return {granted, held, others, settled, is_wanted}
end

local function rate(key, ask)
    local stored = redis.call('HMGET', key, 'level', 'at')
    local level, at = tonumber(stored[1]), tonumber(stored[2])
    if not level then
        at = now
        if is_first or age >= 60000 then level = ask[3] else level = ask[3] * age / 60000 end
    end
    level = math.min(ask[3], level + math.max(0, now - at) * ask[3] / 60000 + ask[6])
    local granted = grant(math.floor(level), ask[7], ask[8])
    level = level - granted
    redis.call('HSET', key, 'level', string.format('%.6f', level), 'at', text(math.max(now, at)))
    return {granted, 0, 0, math.floor(level), 0}
end

local function slots(key, ask)
    local others = 0
    local stored = redis.call('HGETALL', key)
    for i = 1, #stored, 2 do
        if stored[i] ~= holder then
            if redis.call('EXISTS', prefix .. 'live:' .. stored[i]) == 1 then
                others = others + tonumber(stored[i + 1])
            else redis.call('HDEL', key, stored[i]) end
        end
    end
    local kept, granted = math.max(0, math.min(ask[4], ask[3] - others)), 0
    if is_first or age >= ttl then granted = grant(ask[3] - others - kept, ask[7], ask[8]) end
    local held = kept + granted
    if held > 0 then redis.call('HSET', key, holder, text(held)) else redis.call('HDEL', key, holder) end
    return {granted, held, others, 0, 0}
end

local kinds = {[0] = budget, [1] = rate, [2] = slots}
local answers = {}
for i, ask in ipairs(cmsgpack.unpack(ARGV[6])) do
    local key = prefix .. generation .. ':' .. ask[2] .. ':' .. ask[1]
    answers[i] = kinds[ask[2]](key, ask)
    redis.call('EXPIRE', key, ask[9])
end
local packed = cmsgpack.pack({tonumber(generation), answers})
redis.call('HSET', last_key, 'number', number, 'answers', packed)
redis.call('EXPIRE', last_key, 86400)
return packed
"""
)

PUBLISH = (
    _HEAD
    + """
-- The rebuilt state applies, unless the server was restarted while it was written, or a newer one applies.
local generation, of_run_id = ARGV[2], ARGV[3]
if run_id ~= of_run_id then return 0 end
local state = redis.call('HMGET', prefix .. 'state', 'run_id', 'generation')
if state[1] == run_id and tonumber(state[2]) >= tonumber(generation) then return 0 end
redis.call('HSET', prefix .. 'state', 'run_id', run_id, 'generation', generation, 'built_ms', text(now))
return 1
"""
)

CLAIM = (
    _HEAD
    + """
local domain, gateway, address, seen, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local started = redis.call('HMGET', prefix .. 'started', 'run_id', 'ms')
if started[1] ~= run_id then
    redis.call('HSET', prefix .. 'started', 'run_id', run_id, 'ms', text(now))
    started[2] = text(now)
end
local key = prefix .. 'owner:' .. domain
local owner = redis.call('HMGET', key, 'gateway', 'address', 'epoch', 'run_id')
local is_owned = owner[1] and owner[4] == run_id
if is_owned and owner[1] ~= gateway then
    return {owner[1], owner[2], owner[3]}
end
local epoch = owner[3]
if not is_owned then
    if now - tonumber(started[2]) < ttl then return {'', '', '0'} end
    local last = tonumber(redis.call('GET', prefix .. 'epoch:' .. domain) or '0')
    epoch = text(math.max(last + 1, seen + 1, now))
    redis.call('SET', prefix .. 'epoch:' .. domain, epoch)
end
redis.call('HSET', key, 'gateway', gateway, 'address', address, 'epoch', epoch, 'run_id', run_id)
redis.call('PEXPIRE', key, ttl)
return {gateway, address, epoch}
"""
)

LINKS = (
    _HEAD
    + """
local key, position, most = prefix .. 'links', ARGV[2], tonumber(ARGV[4])
for _, one in ipairs(cmsgpack.unpack(ARGV[3])) do
    redis.call('XADD', key, 'MAXLEN', '~', ARGV[5], '*', 'tenant', one[1], 'run', one[2], 'parent', one[3])
    redis.call('EXPIRE', key, ARGV[6])
end
local found = redis.call('XRANGE', key, '(' .. position, '+', 'COUNT', most)
local links = {}
for i, entry in ipairs(found) do
    links[i] = {entry[2][2], entry[2][4], entry[2][6]}
    position = entry[1]
end
return cmsgpack.pack({position, links, #found < most, run_id})
"""
)

RESIGN = """
local key = ARGV[1] .. 'owner:' .. ARGV[2]
local owner = redis.call('HMGET', key, 'gateway', 'epoch')
if owner[1] == ARGV[3] and owner[2] == ARGV[4] then redis.call('DEL', key) end
"""
