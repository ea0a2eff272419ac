"""The page at `/`: what its file holds, who gets it, and what it does in a real browser."""

import asyncio
import base64
import hashlib
import re
import socket
import threading
import time
from collections import Counter
from html.parser import HTMLParser

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from kappa_router.api.app import Access, Door, make_app
from kappa_router.page.mount import add_page
from tests import browser
from tests.router.building import tenants_of

FEEDS = ("nodes", "decisions", "tenants", "models")
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
BACKWARDS = "safe\u202eeliforp\x00"


# -- the file --------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Elements with their attributes, and the text of script and style."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.inline, self._within = [], {"script": [], "style": []}, None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data):
        if self._within in self.inline:
            self.inline[self._within].append(data)

    def handle_endtag(self, tag):
        self._within = None


@pytest.fixture
async def page():
    """The answer to `GET /` where every client needs a key."""
    app = make_app(Door(Access(tenants_of({"sk-ops": "ops"}, refuse=True))))
    add_page(app)
    app.get("/v1/nodes")(lambda: {"nodes": []})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for method, path, status in (
            ("HEAD", "/", 200), ("POST", "/", 405), ("GET", "/v1/nodes", 401),
        ):  # fmt: skip
            assert (await client.request(method, path)).status_code == status, (method, path)
        return await client.get("/")


def test_page_is_for_all_and_runs_only_its_own_script(page):
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    inline = Reader(page.text).inline
    policy = dict(
        rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; ")
    )
    for kind in ("script", "style"):
        [text] = inline[kind]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"


def test_file_asks_nothing_of_others_and_writes_text_alone(page):
    read = Reader(page.text)
    [script], [style] = read.inline["script"], read.inline["style"]
    for tag, attributes in read.elements:
        assert not {"src", "style", "action"} & set(attributes), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert attributes.get("href", "data:,") == "data:,"
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", script + style)
    for word in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
        "setHTML", "DOMParser", "createContextualFragment", "localStorage", "cookie",
    ):  # fmt: skip
        assert word not in script
    asked = re.findall(r"(?:path: [\"`])([^\"`?]+)", script)
    assert asked == [f"v1/{name}" for name in ("nodes", "decisions", "tenants", "models")]


def test_elements_that_scripts_or_labels_name_are_there(page):
    read = Reader(page.text)
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"\$\(\"([a-z-]+)\"\)", read.inline["script"][0])) <= set(ids)
    for tag, attributes in read.elements:
        for name in ("for", "aria-labelledby", "aria-controls"):
            assert attributes.get(name) in (None, *ids)
        if tag in ("input", "select"):
            assert ("label", attributes["id"]) in [(t, a.get("for")) for t, a in read.elements]


# -- in a browser ----------------------------------------------------------------------------------


class Feeds:
    """A server of the page; its feeds answer as the test sets them.

    answers: by feed; key: without it 401; tenant_key: a key that is no
    operator's; delay_s: before each answer. asked, keys: what came; most: of one feed, the most
    requests at a time.
    """

    def __init__(self):
        self.answers = {
            "nodes": {"nodes": []}, "decisions": {"decisions": []}, "tenants": {"tenants": []},
            "models": {"data": [{"id": "m"}]},
        }  # fmt: skip
        self.key = self.tenant_key = None
        self.status, self.delay_s = {}, 0.0
        self.asked, self.open, self.most, self.keys = Counter(), Counter(), Counter(), []
        routes = [Route(f"/v1/{name}", self._answering(name)) for name in FEEDS]
        self.app = Starlette(routes=routes)
        add_page(self.app)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        config = uvicorn.Config(self.app, log_level="error", lifespan="off", access_log=False)
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        asyncio.run(self._server.serve([self._listener]))

    def _answering(self, name):
        async def answer(request):
            self.asked[name] += 1
            self.open[name] += 1
            self.most[name] = max(self.most[name], self.open[name])
            try:
                await asyncio.sleep(self.delay_s)
            finally:
                self.open[name] -= 1
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            self.keys.append(given)
            if self.key and given not in (self.key, self.tenant_key):
                return JSONResponse({"error": {}}, 401)
            if self.key and given != self.key and name in ("nodes", "tenants"):
                return JSONResponse({"error": {}}, 403)
            answers = self.answers[name]
            data = answers() if callable(answers) else answers
            return JSONResponse(data, self.status.get(name, 200))

        return answer

    def close(self):
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def tabs():
    if browser.CHROMIUM is None:
        pytest.skip(browser.WHY_NOT)
    with browser.browser() as opened:
        yield opened


@pytest.fixture
def feeds():
    made = Feeds()
    yield made
    made.close()


@pytest.fixture
def tab(tabs, feeds):
    """An empty tab; after the test the page must have had no fault, and asked its server alone."""
    opened = tabs()
    yield opened
    opened.run("1")
    assert not opened.faults
    for request in opened.requests:
        assert request["url"].startswith((feeds.url, "about:", "data:")), request["url"]
    opened.close()


def node(name="a", **changes):
    """A row of /v1/nodes, as far as the page reads it."""
    return {
        "worker": f"w-{name}", "node": name, "paced": False, "emulated_model": None,
        "engine": "vllm", "role": "both", "pool": "p", "kappa_crit": 241.0, "kappa_eff": 58.0,
        "profile": {"gpu": "H100", "link_name": "PCIe-5 x16", "source": "measured", "dilation": 1},
        "tiers": [{"tier": "host", "blocks": 400, "bytes_per_s": 5e10}],
        "limits": {"block_tokens": 16, "device_blocks": 100},
        "held_blocks": {"device": 25, "host": 300, "disk": 0},
        "prompt_tokens": {"device": 100, "host": 500, "new": 400},
        "in_flight": 3, "others_in_flight": 1, "link_backlog_s": 0.25, "gpu_backlog_s": 1.0,
        "seen_s_ago": 0.2, "draining": False, "breaker": {"state": "closed", "why": None},
        "profile_error": None, "totals": {"running": 2, "loading": 0, "waiting": 1}, **changes,
    }  # fmt: skip


def decision(number=0, **changes):
    """A row of /v1/decisions."""
    return {
        "request_id": f"r-{number}", "time_s": time.time(), "tenant": "alice", "node": "a",
        "paced": False, "policy": "priced", "reason": "faster_load", "bound": "memory",
        "ratio": 300.0, "kappa_crit": 241.0, "attempt": 0, "end": "done", "shadow": None,
        "soonest_other": {"node": "b", "ttft_s": 0.9},
        "predicted": {"device_tokens": 0, "cached_tokens": 3000, "disk_tokens": 1000,
                      "new_tokens": 1000, "queue_s": 0.1, "load_s": 0.3, "compute_s": 0.1,
                      "ttft_s": 0.6},
        "actual": {"device_tokens": None, "cached_tokens": None, "disk_tokens": None,
                   "new_tokens": None, "queue_s": 0.1, "load_s": 0.2, "compute_s": 0.1,
                   "ttft_s": 0.5}, **changes,
    }  # fmt: skip


def tenant(name, share):
    shares = dict.fromkeys(("vram", "gpu", "link"), share)
    charged = dict.fromkeys(("vram_s", "gpu_s", "link_s"), 10 * share)
    return {"tenant": name, "weight": 2.0, "charged": charged, "share": shares}


def lengths(tab, selector):
    """How much of each bar its parts fill, in percent."""
    return tab.run(
        f"[...document.querySelectorAll({selector!r})].map(bar => [...bar.children].map(part =>"
        " Math.round(100 * part.style.transform.match(/scaleX[(](.*)[)]/)[1])))"
    )


def test_nodes_show_backlogs_caches_by_tier_and_tokens_by_source(feeds, tab):
    feeds.answers["nodes"] = {"nodes": [node("a"), node("b", link_backlog_s=2.0)]}
    feeds.answers["tenants"] = {"tenants": [tenant("small", 0.25), tenant("large", 0.75)]}
    tab.open(feeds.url)
    rows(tab, "nodes", 2)
    first = "#nodes tbody tr:first-child"
    row = tab.text(first)
    for text in ("250 ms", "1.00 s", "4", "2 running 1 waiting", "241", "κ_eff 58", "25 %",
                 "of 1.60k", "75 %", "of 6.40k",
                 "device 10 %, host 50 %, new 40 %, of 1.00k"):  # fmt: skip
        assert text in row, (text, row)
    # Both columns have one scale, the round figure above the longest backlog: 2 s.
    assert lengths(tab, f"{first} .meter .bar") == [[13], [50]]
    assert lengths(tab, "#nodes tbody tr:last-child .meter .bar") == [[100], [50]]
    assert lengths(tab, f"{first} .stack") == [[10, 50, 0, 40]]
    assert "0 to 2.00 s" in tab.text("#nodes-says") and tab.text("#model") == "m"
    assert [tab.text(f"#f-{name}") for name in ("nodes", "flight", "backlog", "reused")] == [
        "2 of 2", "8", "2.00 s", "60 %",
    ]  # fmt: skip
    assert tab.text("#tenants tbody").split()[0] == "large" and not tab.run("!emulation.hidden")
    # A bar moves with the next answer.
    feeds.answers["nodes"] = {"nodes": [node("a", link_backlog_s=1.0), node("b")]}
    tab.until("document.getElementById('nodes-says').textContent.includes('0 to 1.00 s')")
    assert lengths(tab, f"{first} .meter .bar") == [[100], [100]]


def rows(tab, table, count):
    """Wait until the table has that many rows."""
    tab.until(f"document.querySelectorAll('#{table} tbody tr').length === {count}")


def js_text(selector):
    return f"document.querySelector({selector!r}).innerText"


def test_decision_shows_predicted_and_actual_seconds_and_why(feeds, tab):
    running = decision(1, end="", actual={}, soonest_other={"node": "b", "ttft_s": 0.2})
    lost = decision(2, reason="less_harm", attempt=1, end="worker_died", actual={})
    feeds.answers["decisions"] = {"decisions": [decision(0), running, lost]}
    tab.open(feeds.url)
    rows(tab, "decisions", 3)
    newest, waiting, done = (tab.text(f"#decisions tbody tr:nth-child({i})") for i in (1, 2, 3))
    assert "faster load: 600 ms here, 900 ms on b" in done and "+20 %" in done
    assert done.index("600 ms here") < done.index("memory-bound: κ 300 of κ_crit 241")
    assert "host 2.00k, disk 1.00k, new 1.00k, predicted" in done
    assert "though 200 ms on b" in waiting and "waits …" in waiting
    assert "delays others less" in newest
    assert "retried" in newest and "worker died" in newest and "none" in newest
    # The scale is 1.25 times the longest: queue, load, compute, rest of 0.75 s.
    bars = lengths(tab, "#decisions tbody tr:nth-child(3) .pair .bar")
    assert bars == [[13, 40, 13, 13], [13, 27, 13, 13]]
    assert tab.text("#f-error") == "20 %"
    tab.type("#find", "worker_died")
    rows(tab, "decisions", 1)


def test_paced_and_emulated_nodes_are_marked(feeds, tab):
    profile = {"gpu": "H100", "link_name": "PCIe-5", "source": "paced", "dilation": 30}
    paced = node("a", paced=True, emulated_model="llama-3.1-8b", profile=profile)
    broken = node("c", breaker={"state": "half_open", "why": "errors"}, draining=True,
                  seen_s_ago=14.0)  # fmt: skip
    feeds.answers["nodes"] = {"nodes": [paced, node("b", engine="emulated"), broken]}
    feeds.answers["decisions"] = {"decisions": [decision(paced=True)]}
    tab.open(feeds.url)
    rows(tab, "nodes", 3)
    assert "paced ×30" in tab.text("#nodes tbody tr:nth-child(1)")
    assert "emulated engine" in tab.text("#nodes tbody tr:nth-child(2)")
    assert "paced" in tab.until(js_text("#decisions tbody tr"))
    said = tab.text("#emulation")
    assert "1 of 3 nodes are paced" in said and "llama-3.1-8b" in said and "takes 30 here" in said
    assert "1 of 3 engines are emulated" in said
    row = tab.text("#nodes tbody tr:nth-child(3)")
    assert "breaker half open" in row and "silent 14.0 s" in row and "draining" in row
    assert tab.text("#f-nodes") == "2 of 3"


def test_hostile_names_stay_text(feeds, tab):
    feeds.answers |= {
        "nodes": {"nodes": [node(HOSTILE, emulated_model=HOSTILE, paced=True, pool=HOSTILE,
                                 role=HOSTILE, profile_error=HOSTILE, kappa_crit=HOSTILE,
                                 totals={"running": HOSTILE}, prompt_tokens={HOSTILE: 5},
                                 breaker={"state": HOSTILE, "why": HOSTILE}), {}, None, 7]},
        "decisions": {"decisions": [decision(
            request_id=HOSTILE, tenant=BACKWARDS, node=HOSTILE, reason=HOSTILE, bound=HOSTILE,
            end=HOSTILE, soonest_other={"node": HOSTILE, "ttft_s": 1.0}), {}, "x"]},
        "tenants": {"tenants": [tenant(HOSTILE, 0.5), {"tenant": "x" * 9000}]},
        "models": {"data": [{"id": HOSTILE}]},
    }  # fmt: skip
    tab.open(feeds.url)
    tab.until("document.querySelectorAll('#tenants tbody tr, #decisions tbody tr').length === 4")
    tab.until("model.textContent")
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.run("document.scripts.length") == 1 and not tab.run("window.broken")
    assert HOSTILE[:60] in tab.text("#nodes") and HOSTILE[:40] in tab.text("#decisions")
    assert HOSTILE[:60] in tab.text("#tenants") and HOSTILE[:60] in tab.text("#model")
    assert "safe\ufffdeliforp\ufffd" in tab.text("#decisions")
    assert "x" * 61 not in tab.text("#tenants")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_fits_64_nodes_on_laptop_and_phone_in_both_themes(feeds, tab, width, scheme):
    feeds.answers["nodes"] = {"nodes": [node(f"gpu-node-{i:02}") for i in range(64)]}
    feeds.answers["decisions"] = {"decisions": [decision(i) for i in range(60)]}
    tab.open(feeds.url, width, prefers_color_scheme=scheme)
    rows(tab, "nodes", 64)
    rows(tab, "decisions", 60)
    assert tab.run("document.documentElement.scrollWidth") <= width
    wide = (
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    )
    assert tab.run(f"{wide}.length") == 0
    assert contrasts(tab, "body", "tbody small", "th", "#emulation", "footer", ".legend") >= 4.5


def contrasts(tab, *selectors):
    """The least contrast (WCAG 2) of these elements' text to what lies behind it."""
    return tab.run(
        """(selectors => {
          const parse = text => text.match(/[\\d.]+/g).map(Number);
          const light = text => { const [r, g, b] = parse(text).slice(0, 3).map(v => v / 255).map(
            v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            return .2126 * r + .7152 * g + .0722 * b; };
          const behind = at => { const c = getComputedStyle(at).backgroundColor;
            return parse(c)[3] !== 0 ? c : at.parentElement ? behind(at.parentElement)
              : 'rgb(255,255,255)'; };
          return Math.min(...selectors.map(s => document.querySelector(s)).map(at => {
            const both = [light(getComputedStyle(at).color), light(behind(at))];
            const [a, b] = both.sort((x, y) => y - x);
            return (a + .05) / (b + .05); })); })"""
        + f"({list(selectors)})"
    )


def test_key_is_asked_for_kept_in_the_tab_and_sent(feeds, tab):
    feeds.key, feeds.tenant_key = "sk-operator", "sk-tenant"
    feeds.answers["nodes"] = {"nodes": [node()]}
    feeds.answers["decisions"] = {"decisions": [decision()]}
    tab.open(feeds.url)
    tab.until(
        "says.textContent.includes('asks for a key') && !document.getElementById('key-form').hidden"
    )
    assert tab.text("#state") == "no access" and tab.run("document.activeElement.id") == "key"
    enter(tab, "sk-wrong")
    tab.until("says.textContent.includes('does not know this key')")
    asked = feeds.asked.copy()
    enter(tab, "sk-tenant")
    rows(tab, "decisions", 1)
    tab.until("state.textContent === 'live' && document.getElementById('nodes-says').textContent")
    assert "for operators only" in tab.text("#nodes-says") and not tab.run("nodes.length")
    # A wrong key is not tried again and again.
    assert feeds.asked["nodes"] <= asked["nodes"] + 1
    enter(tab, "sk-operator")
    tab.until(
        "document.querySelectorAll('#nodes tbody tr').length === 1 && state.textContent === 'live'"
    )
    assert tab.run("sessionStorage.length") == 1 and tab.run("says.hidden")
    assert "sk-" not in tab.run(
        "location.href + document.documentElement.outerHTML + document.cookie"
    )
    tab.open(feeds.url)
    rows(tab, "nodes", 1)
    tab.run("document.getElementById('forget').click()")
    tab.until("says.textContent.includes('asks for a key')")
    assert tab.run("sessionStorage.length + document.querySelectorAll('tbody tr').length") == 0
    assert set(feeds.keys) == {"", "sk-wrong", "sk-tenant", "sk-operator"}


def enter(tab, key):
    tab.run("openKey(true)")
    tab.type("#key", key)
    tab.press("Enter")


def test_lost_server_is_named_with_its_silence_until_it_is_back(feeds, tab):
    feeds.answers["nodes"] = {"nodes": [node()]}
    tab.open(feeds.url)
    tab.until("state.textContent === 'live'")
    tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0,
             uploadThroughput=0)  # fmt: skip
    tab.until("/no answer since [0-9]+ s/.test(state.textContent)")
    assert "cannot be reached" in tab.text("#says")
    assert tab.run("document.body.classList.contains('stale')")
    # What was known last is still there to be read.
    assert tab.run("document.querySelectorAll('#nodes tbody tr').length") == 1
    tab.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1,
             uploadThroughput=-1)  # fmt: skip
    tab.until("state.textContent === 'live' && says.hidden")
    tab.run("feeds.forEach(feed => feed.every_s = 0.05); wakeAll()")
    feeds.status = {"nodes": 503, "tenants": 404}
    tab.until(
        "says.textContent.includes('answers 503') && document.getElementById('tenants').hidden"
    )
    feeds.status = {"decisions": 429}
    tab.until("says.textContent.includes('429')")
    feeds.status = {}
    tab.until("wakeAll() || state.textContent === 'live'")


def test_slow_feed_is_never_asked_again_before_its_answer(feeds, tab):
    feeds.delay_s = 0.4
    tab.open(feeds.url)
    tab.run(
        "feeds.forEach(feed => feed.every_s = 0.01); wakeAll();for (let i = 0; i < 50; i++) judge()"
    )
    before = feeds.asked["nodes"]
    while feeds.asked["nodes"] < before + 6:
        tab.run("wakeAll()")
        time.sleep(0.05)
    assert max(feeds.most.values()) == 1


def test_hundreds_of_decisions_a_second_leave_nothing_behind(feeds, tab):
    made = iter(range(10**9))

    def next_decisions():
        return {"decisions": [decision(next(made), tenant=f"t-{next(made)}") for _ in range(120)]}

    feeds.answers["decisions"] = next_decisions
    feeds.answers["nodes"] = lambda: {"nodes": [node(f"n{next(made)}") for _ in range(8)]}
    tab.open(feeds.url)
    tab.run("feeds.forEach(feed => feed.every_s = 0.001); wakeAll()")

    def after(polls):
        goal = feeds.asked["decisions"] + polls
        while feeds.asked["decisions"] < goal:
            time.sleep(0.02)
        elements = tab.run("document.getElementsByTagName('*').length")
        return elements, min(kept_bytes() for _ in range(5))

    def kept_bytes():
        # An answer may be on its way.
        tab.call("HeapProfiler.collectGarbage")
        return tab.call("Runtime.getHeapUsage")["usedSize"]

    elements, used_bytes = after(10)
    later, later_bytes = after(40)
    assert later == elements and tab.run("decisions.length") == 60
    assert later_bytes < used_bytes + 500_000
    # What the answers would come to if they were kept: 40 of 60 decisions of 700 bytes.
    assert tab.run("JSON.stringify(decisions).length * 40") > 1_000_000
    assert float(tab.text("#f-rate").replace("k", "e3")) > 0


def test_page_is_reached_by_keyboard_and_its_stream_held(feeds, tab):
    feeds.answers["decisions"] = lambda: {"decisions": [decision(feeds.asked["decisions"])]}
    tab.open(feeds.url)
    tab.run("feeds.forEach(feed => feed.every_s = 0.05); wakeAll()")
    rows(tab, "decisions", 1)
    reached = []
    while "pause" not in reached:
        assert len(reached) < 12, reached
        tab.press("Tab")
        reached.append(tab.run("document.activeElement.id || document.activeElement.className"))
    assert reached == ["change-key", "order", "scroll", "find", "pause"]
    tab.press(" ")
    tab.until("document.getElementById('pause').getAttribute('aria-pressed') === 'true'")
    held, asked = tab.text("#decisions tbody"), feeds.asked["decisions"]
    while feeds.asked["decisions"] < asked + 5:
        time.sleep(0.02)
    assert tab.text("#decisions tbody") == held and "paused" in tab.text("#state")
    tab.press(" ")
    tab.until(f"document.querySelector('#decisions tbody').innerText !== {held!r}")
