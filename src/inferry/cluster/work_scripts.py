"""Scripts of the work queue, which Redis runs atomically.

Keys, behind a prefix: `ids`, the set of all ids in the queue; `stream:NAME`, the entries of one lane, model and tenant,
read by the group `runners`; `turns:LANE`, the streams of a lane, the one that was served longest ago first; `bell`, a
stream with one entry, which is replaced when work is added; `workers`, pull-workers by the time they were last seen.
An id is in `ids` exactly while a stream has its entry. A stream without entries is deleted.
"""

_HEAD = """
local prefix, consumer = ARGV[1], ARGV[2]
local function key(name) return prefix .. 'stream:' .. name end
local function set_of(list)
    local found = {}
    for _, one in ipairs(list) do found[one] = true end
    return found
end
local function append(name, id)
    local stream = key(name)
    if redis.call('EXISTS', stream) == 0 then
        redis.call('XGROUP', 'CREATE', stream, 'runners', '0', 'MKSTREAM')
    end
    redis.call('XADD', stream, '*', 'id', id)
    local lane = string.match(name, '^[^:]*')
    redis.call('ZADD', prefix .. 'turns:' .. lane, 'NX', redis.call('INCR', prefix .. 'turn'), name)
end
local function remove(name, entry)
    redis.call('XACK', key(name), 'runners', entry)
    redis.call('XDEL', key(name), entry)
end
local function ring(count)
    if count > 0 then redis.call('XADD', prefix .. 'bell', 'MAXLEN', 1, '*', 'n', count) end
end
local function names_of(lane, wanted)
    local models, skipped, busy = wanted.models and set_of(wanted.models), set_of(wanted.skipped), set_of(wanted.busy)
    local found = {}
    for _, name in ipairs(redis.call('ZRANGE', prefix .. 'turns:' .. lane, 0, -1)) do
        local model = string.match(name, '^[^:]*:([^:]*):')
        if not busy[name] and not skipped[model] and (not models or models[model]) then
            found[#found + 1] = name
        end
    end
    return found
end
"""

ADD = (
    _HEAD
    + """
local added = 0
for _, one in ipairs(cmsgpack.unpack(ARGV[3])) do
    if redis.call('SADD', prefix .. 'ids', one[2]) == 1 then
        append(one[1], one[2])
        added = added + 1
    end
end
ring(added)
return added
"""
)

TAKE = (
    _HEAD
    + """
local wanted, found = cmsgpack.unpack(ARGV[3]), {}
for _, lane in ipairs(wanted.lanes) do
    local turns, free, names = prefix .. 'turns:' .. lane[1], lane[2], names_of(lane[1], wanted)
    while free > 0 and #names > 0 do
        local quantum, left = math.ceil(free / #names), {}
        for _, name in ipairs(names) do
            local count = math.min(quantum, free)
            if count == 0 then break end
            local read = redis.pcall(
                'XREADGROUP', 'GROUP', 'runners', consumer, 'COUNT', count, 'STREAMS', key(name), '>')
            if read and read.err then
                redis.call('ZREM', turns, name)
            elseif read then
                for _, entry in ipairs(read[1][2]) do
                    found[#found + 1] = {name, entry[1], entry[2][2], 1, ''}
                end
                free = free - #read[1][2]
                redis.call('ZADD', turns, redis.call('INCR', prefix .. 'turn'), name)
                if #read[1][2] == count then left[#left + 1] = name end
            elseif redis.call('XLEN', key(name)) == 0 then
                redis.call('DEL', key(name))
                redis.call('ZREM', turns, name)
            end
        end
        names = left
    end
end
return cmsgpack.pack(found)
"""
)

CLAIM = (
    _HEAD
    + """
local wanted, idle, most, is_dead = cmsgpack.unpack(ARGV[3]), ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1'
local found = {}
for _, lane in ipairs(wanted.lanes) do
    local free = lane[2]
    for _, name in ipairs(names_of(lane[1], wanted)) do
        if free <= 0 then break end
        local pending = redis.pcall('XPENDING', key(name), 'runners', 'IDLE', idle, '-', '+', free)
        if pending.err then pending = {} end
        for _, one in ipairs(pending) do
            if (one[4] >= most) == is_dead then
                local claimed = redis.call('XCLAIM', key(name), 'runners', consumer, idle, one[1])
                if claimed[1] then
                    found[#found + 1] = {name, one[1], claimed[1][2][2], one[4] + 1, one[2]}
                    free = free - 1
                end
            end
        end
    end
end
return cmsgpack.pack(found)
"""
)

RENEW = (
    _HEAD
    + """
local time = redis.call('TIME')
local lost = {}
for _, one in ipairs(cmsgpack.unpack(ARGV[3])) do
    local held = redis.pcall('XPENDING', key(one[1]), 'runners', one[2], one[2], 1)
    -- An entry that is missing is no one's: after a loss of data its holder goes on.
    if not held.err and held[1] then
        if held[1][2] == consumer then
            redis.call('XCLAIM', key(one[1]), 'runners', consumer, 0, one[2], 'JUSTID')
        else
            lost[#lost + 1] = one
        end
    end
end
if ARGV[4] == '1' then redis.call('ZADD', prefix .. 'workers', time[1], consumer) end
redis.call('ZREMRANGEBYSCORE', prefix .. 'workers', '-inf', '(' .. (time[1] - ARGV[5]))
return cmsgpack.pack({lost, redis.call('SCARD', prefix .. 'ids'), redis.call('ZCARD', prefix .. 'workers')})
"""
)

DONE = (
    _HEAD
    + """
for _, one in ipairs(cmsgpack.unpack(ARGV[3])) do
    remove(one[1], one[2])
    redis.call('SREM', prefix .. 'ids', one[3])
end
"""
)

PUT_BACK = (
    _HEAD
    + """
local entries = cmsgpack.unpack(ARGV[3])
for _, one in ipairs(entries) do
    -- Not where another consumer has it, or where it was added again after a loss of data.
    local held = redis.pcall('XPENDING', key(one[1]), 'runners', one[2], one[2], 1)
    if not held.err and held[1] and held[1][2] == consumer then
        remove(one[1], one[2])
        append(one[1], one[3])
    end
end
ring(#entries)
"""
)
