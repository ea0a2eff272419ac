-- Before each attempt at a server but the first: a request that some server may have begun to
-- compute goes on only if the decider that sent it there says so. What it says instead is the
-- client's answer. A worker of ours that is only late goes on meanwhile, and the decider answers
-- once it is lost.
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
  local answer, body = handle:httpCall(OF_SLOT .. slot, question, "", ANSWER_MS)
  headers = handle:headers() -- Those of before are out of reach after a wait.
  if answer[":status"] == "200" then
    for name, value in pairs(answer) do
      if name:sub(1, 11) == "x-kappa-to-" then
        headers:replace(name, value)
      end
    end
    return
  end
  if answer["content-type"] ~= "application/json" then
    if headers:get("x-envoy-is-timeout-retry") == "true" then
      return -- The first attempt goes on, too; to answer here would end it.
    end
    answer = { [":status"] = "503", ["content-type"] = "application/json", ["retry-after"] = "1" }
    body = AWAY
  end
  handle:respond(answer, body)
end
