"""Workloads as a command line names them; the hub is a small server of this test."""

import json
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kappa_loadtest.datasets import SHAREGPT_FILE, fetched, open_workload, token_counter
from kappa_workload.reading import WorkloadError

TALKS = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "one two three"},
            {"from": "gpt", "value": "four five"},
        ],
    }
]
PAGES = [{"Context": "a long filing", "Question": "how much?", "Answer": 5}]
COMMIT = "1" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves one file of the data set owner/talks and all of owner/pages, as the hub does."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        folder = "/datasets/owner/pages"
        files = {
            "/": {},
            f"/datasets/owner/talks/resolve/main/{SHAREGPT_FILE}": TALKS,
            f"/api{folder}/revision/main": {"id": "owner/pages", "sha": COMMIT},
            f"/api{folder}/tree/{COMMIT}?recursive=true&expand=false": [
                {"type": "file", "path": name, "size": size, "oid": "abc"}
                for name, size in (("README.md", 9), ("dev.json", len(json.dumps(PAGES))))
            ],
            f"{folder}/resolve/{COMMIT}/dev.json": PAGES,
        }  # fmt: skip
        body = json.dumps(files.get(self.path)).encode()
        found = self.path in files
        self.server.requested.append(f"{self.command} {self.path}")
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", COMMIT)
        if not found:
            is_there = self.path.startswith(folder)
            self.send_header("X-Error-Code", "EntryNotFound" if is_there else "RepoNotFound")
        self.send_header("Content-Length", str(len(body) if found else 0))
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requested = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    use(monkeypatch, tmp_path, server.server_port)
    yield server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def use(monkeypatch, folder, port):
    from huggingface_hub import constants

    endpoint, template = f"http://127.0.0.1:{port}", constants.HUGGINGFACE_CO_URL_TEMPLATE
    there = template.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", there)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)


def test_a_data_set_of_the_hub_is_fetched_once(hub):
    workload = open_workload("hf:owner/talks", block_tokens=16)
    assert workload.name == "sharegpt"
    assert workload.texts.messages(0, 0, 0) == ({"role": "user", "content": "one two three"},)

    requested = list(hub.requested)
    assert any(line.startswith("GET /datasets/owner/talks") for line in requested)
    assert json.loads(fetched(f"hf:owner/talks/{SHAREGPT_FILE}").read_text()) == TALKS
    assert hub.requested == requested


def test_a_data_set_of_the_hub_is_read_whole(hub):
    workload = open_workload("hf:owner/pages")
    assert (workload.name, workload.source) == ("finqa", "DocFinQA, dev.json")
    (message,) = workload.texts.messages(0, 0, 0)
    assert message["content"] == "a long filing\n\nhow much?"
    assert not any("README" in line for line in hub.requested)


def test_a_missing_data_set_is_an_error_with_a_remedy(hub):
    with pytest.raises(
        WorkloadError, match=r"hf:owner/none: the hub refused it .* run: hf download owner/none"
    ):
        open_workload("hf:owner/none")


def test_without_a_network_it_says_what_to_do_instead(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)  # a port on which no server listens then
    server.server_close()
    use(monkeypatch, tmp_path, server.server_port)
    with pytest.raises(
        WorkloadError,
        match=r"cannot reach http://127.0.0.1:\d+ \(ConnectError\); on a machine that is online, "
        r"run: hf download owner/talks --include '\*.parquet' .* --repo-type dataset",
    ):
        open_workload("hf:owner/talks")
    with pytest.raises(WorkloadError, match=r"run: hf download owner/talks a.json --repo-type"):
        open_workload("hf:owner/talks/a.json")


@pytest.mark.parametrize("name", ["hf:", "hf:talks", "hf:/x"])
def test_half_a_name_is_refused_before_any_request(name):
    with pytest.raises(WorkloadError, match="expected hf:OWNER/NAME"):
        open_workload(name)


def test_names_and_paths_need_no_hub(tmp_path):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    assert open_workload(str(path)).sessions[0].id == "a/0"
    assert open_workload("azure").name == "azure"
    assert open_workload("finqa", scale=Fraction("1/32")).block_tokens == 8
    with pytest.raises(WorkloadError, match="no workload and no file 'owner/talks'"):
        open_workload("owner/talks")


def test_a_tokenizer_measures_texts(tmp_path):
    words = ["one", "two", "three", "four", "five"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        turn = open_workload(str(path), tokenizer=str(place)).sessions[0].turns[0]
        assert (turn.input_tokens, turn.output_tokens) == (3, 2)


def test_no_tokenizer_and_a_broken_one_are_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"tokenizer.json: no tokenizer there; give a"):
        token_counter(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError, match=r"tokenizer.json: not a tokenizer"):
        token_counter(str(tmp_path))
