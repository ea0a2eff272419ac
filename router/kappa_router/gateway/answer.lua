-- Tells the decider of a request that a foreign server's answer has its first token. What the answer ended
-- with, how many events it had and whom it says to come from goes to Envoy's log.
local DECIDED = "envoy.filters.http.ext_authz"
-- In an event with a token; announcements and comments have neither.
local MARKS = { '"choices"', "delta" }
local EVENT, LINE_FEED = "data: {", 10

local function has_token(bytes)
  for _, mark in ipairs(MARKS) do
    if string.find(bytes, mark, 1, true) then
      return true
    end
  end
  return false
end

local function events_in(bytes)
  local count, at = 0, string.find(bytes, EVENT, 1, true)
  while at do
    count, at = count + 1, string.find(bytes, EVENT, at + #EVENT, true)
  end
  return count
end

function envoy_on_response(handle)
  local decided = handle:streamInfo():dynamicMetadata():get(DECIDED)
  local id = decided and decided["x-kappa-to-id"]
  if id == nil then
    return
  end
  local kind = handle:headers():get("content-type") or ""
  local streamed = string.find(kind, "text/event-stream", 1, true) == 1
  local from = FROM_HEADER ~= "" and handle:headers():get(FROM_HEADER) or ""
  local function tell_first()
    local headers = { [":method"] = "POST", [":authority"] = "decider", [":path"] = FIRST .. id }
    headers[TOLD_HEADER] = from
    handle:httpCall(OF_SLOT .. decided[SLOT_HEADER], headers, "", 1000, true)
  end
  local begun, events, seam = not streamed, 0, ""
  -- The last bytes are kept in pieces: to join them for every chunk costs more than all else here.
  local pieces, first, last, held = {}, 1, 0, 0
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    local kept = streamed and length or math.min(length, TAIL_BYTES)
    local bytes = chunk:getBytes(length - kept, kept)
    if not begun and has_token(bytes) then
      begun = true
      tell_first()
    end
    if streamed then
      events = events + events_in(bytes)
      -- What parts an event's beginning stands in no chunk as a whole; a line's end parts none.
      if seam ~= "" then
        events = events + events_in(seam .. string.sub(bytes, 1, #EVENT - 1))
      end
      local whole = string.byte(bytes, -1) == LINE_FEED
      seam = whole and "" or string.sub(seam .. string.sub(bytes, 1 - #EVENT), 1 - #EVENT)
    end
    last = last + 1
    pieces[last] = length > TAIL_BYTES and string.sub(bytes, -TAIL_BYTES) or bytes
    held = held + #pieces[last]
    while held - #pieces[first] >= TAIL_BYTES do
      held = held - #pieces[first]
      pieces[first], first = nil, first + 1
    end
  end
  local tail = string.sub(table.concat(pieces, "", first, last), -TAIL_BYTES)
  local answer = handle:streamInfo():dynamicMetadata()
  answer:set(ANSWER, "from", from)
  answer:set(ANSWER, "events", tostring(events))
  -- Text in ASCII alone: nothing in the log may look like the beginning of a message of its own.
  answer:set(ANSWER, "tail", (string.gsub(tail, "[^\9\10\13\32-\126]", "?")))
end
