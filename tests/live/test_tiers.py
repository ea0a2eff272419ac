"""KV that left the device comes back from the host tier, and means the same as before."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.live


def ask(live, text, max_tokens):
    raw = live.openai.chat.completions.with_raw_response.create(
        model=live.model,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    return raw.parse(), live.decision(raw.headers["x-request-id"])


def story(name):
    lines = (
        f"Line {i} of the story of {name}: {name} counts {i * 7919 % 1000}." for i in range(90)
    )
    return "\n".join(lines)


def test_evicted_prompt_returns_from_host_with_the_same_answer(idle):
    first, _ = ask(idle, story("Ada"), 16)
    prompt_tokens = first.usage.prompt_tokens
    # Both devices together hold 2 * 199 blocks of 32 tokens; this is more.
    fillers = [f"filler number {i}" for i in range(2 * 200 * 32 // prompt_tokens + 2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask(idle, story(name), 1), fillers))
    idle.wait_idle()
    said = [{"role": "user", "content": story("Ada")}]
    idle.until_known(prompt_tokens - 64, messages=said)
    host_before = idle.metric("kappa_prompt_tokens_total", source="host")
    again, record = ask(idle, story("Ada"), 16)
    loaded = record["actual"]["cached_tokens"]
    assert loaded > 0
    assert loaded == record["predicted"]["cached_tokens"]
    parts = [record["actual"][part] for part in ("queue_s", "load_s", "compute_s")]
    assert all(parts)
    assert sum(parts) == pytest.approx(record["actual"]["ttft_s"], rel=0.2)
    assert loaded + record["actual"]["device_tokens"] > prompt_tokens - 64
    assert again.usage.prompt_tokens_details.cached_tokens >= loaded
    idle.until(
        lambda: idle.metric("kappa_prompt_tokens_total", source="host") - host_before == loaded,
        "the host tokens were not counted",
    )
    assert again.choices[0].message.content == first.choices[0].message.content
    assert idle.metric("kappa_load_bytes_total") > 0
    assert idle.metric("kappa_store_bytes_total") > 0
