-- Before each attempt at a foreign server, with the headers as the attempt before left them: the
-- client's own path and keys are brought back, then the server's prefix and key take their place.
local KEYS = { "authorization", "x-api-key" }

function envoy_on_request(handle)
  local headers = handle:headers()
  local metadata = handle:streamInfo():dynamicMetadata()
  local client = metadata:get("kappa.client")
  if client == nil then
    metadata:set("kappa.client", "path", headers:get(":path"))
    for _, name in ipairs(KEYS) do
      metadata:set("kappa.client", name, headers:get(name) or "")
    end
    client = metadata:get("kappa.client")
  end
  local key = headers:get("x-kappa-to-key")
  for _, name in ipairs(KEYS) do
    headers:remove(name)
    if key == nil and client[name] ~= "" then
      headers:add(name, client[name])
    end
  end
  if key ~= nil then
    headers:add("authorization", "Bearer " .. key)
  end
  headers:replace(":path", (headers:get("x-kappa-to-prefix") or "") .. client["path"])
  -- The rank stays for the next attempt, of which the decider says another.
  local rank = headers:get("x-kappa-to-rank")
  if rank ~= nil then
    headers:remove("x-data-parallel-rank")
    if rank ~= "none" then
      headers:add("x-data-parallel-rank", rank)
    end
  end
  headers:remove("x-kappa-to-key")
  headers:remove("x-kappa-to-prefix")
end
