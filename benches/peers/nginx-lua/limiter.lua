-- What a careful operator builds on nginx: the key from a table, an exact window by one script in Redis over a pooled
-- connection, the rate-limit headers on every answer.
local redis = require "nginx.redis"

local Limiter = {}
Limiter.__index = Limiter

function Limiter.new(keys_file, script_file, port)
  local self = setmetatable({ keys = {}, port = port, requests = 0 }, Limiter)
  for line in io.lines(keys_file) do
    local key, limit, window = line:match("^(%S+)\t(%d+)\t(%d+)$")
    self.keys[key] = { limit = limit, window = window }
  end
  local file = assert(io.open(script_file))
  self.script = file:read("*a")
  file:close()
  return self
end

local function answer(status, message)
  ngx.status = status
  ngx.header["Content-Type"] = "application/json"
  ngx.print('{"error":{"message":"', message, '"}}')
  ngx.exit(status)
end

function Limiter:decide(key, rule)
  local connection = redis:new()
  connection:set_timeout(1000)
  local connected, why = connection:connect("127.0.0.1", self.port)
  if not connected then return nil, why end
  if not self.hash then
    self.hash, why = connection:script("load", self.script)
    if not self.hash then return nil, why end
  end
  self.requests = self.requests + 1
  local member = table.concat({ ngx.worker.pid(), self.requests, ngx.now() }, ":")
  local arguments = { 1, "ratelimit:" .. key, rule.limit, rule.window, member }
  local decision, failed = connection:evalsha(self.hash, unpack(arguments))
  if failed and failed:find("NOSCRIPT", 1, true) then
    decision, failed = connection:eval(self.script, unpack(arguments))
  end
  if not decision then return nil, failed end
  connection:set_keepalive(60000, 512)
  return decision
end

function Limiter:admit()
  local key = ngx.var.http_x_api_key
  local rule = key and self.keys[key]
  if not rule then return answer(401, "unknown key") end
  local decision, failed = self:decide(key, rule)
  if not decision then
    ngx.log(ngx.ERR, "the limiter failed: ", failed)
    return answer(503, "the limiter is not available")
  end
  local reset = math.ceil(decision[3] / 1000000)
  ngx.header["X-RateLimit-Limit"] = rule.limit
  ngx.header["X-RateLimit-Remaining"] = decision[2]
  ngx.header["X-RateLimit-Reset"] = reset
  if decision[1] == 0 then
    ngx.header["Retry-After"] = reset
    return answer(429, "over the limit")
  end
  ngx.req.clear_header("X-API-Key")
end

return Limiter
