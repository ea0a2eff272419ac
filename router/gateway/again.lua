-- Before each attempt at a server but the first: a request that some server may have begun to
-- compute goes on only if the decider that sent it there says so. What it says instead is the client's answer.
local PASSED_ON = { "x-kappa-to-id", "x-request-id", "x-envoy-attempt-count" }

function envoy_on_request(handle)
  local headers = handle:headers()
  local id, slot = headers:get("x-kappa-to-id"), headers:get(SLOT_HEADER)
  -- Without a slot nobody decided (`decider_away: least_request`), and nobody can be asked now.
  if slot == nil or headers:get("x-envoy-attempt-count") == "1" then
    return
  end
  local question = { [":method"] = "POST", [":authority"] = "decider", [":path"] = AGAIN .. id }
  for _, name in ipairs(PASSED_ON) do
    question[name] = headers:get(name)
  end
  local answer, body = handle:httpCall(OF_SLOT .. slot, question, "", DECIDE_MS)
  if answer[":status"] == "200" then
    -- What was taken of the handle before the call is of no use after it.
    headers = handle:headers()
    for name, value in pairs(answer) do
      if name:sub(1, 11) == "x-kappa-to-" then
        headers:replace(name, value)
      end
    end
    return
  end
  if answer["content-type"] ~= "application/json" then
    answer = { [":status"] = "503", ["content-type"] = "application/json", ["retry-after"] = "1" }
    body = AWAY
  end
  handle:respond(answer, body)
end
