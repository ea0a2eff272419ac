"""A tiny vLLM engine with a host tier, in a process of its own, asked over its standard input.

`TierEngine` starts it and asks; run as a script it is the engine. Its requests load all that they
can, unless they name a plan: then the tail is planned for a link as fast as the gpu.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec
import zmq

from kappa.cost import step_model
from kappa.hardware import node_profile
from kappa.host import free_port
from kappa.model import kv_bytes_per_token
from kappa.protocol import PLAN_KEY
from kappa.settings.engine import EngineSettings, TransferSettings
from kappa.shapes import model_shape
from kappa_workers.tiny_model import make_tiny_model
from kappa_workers.vllm.arguments import CPU_ENV, EngineTier, meet_peers, transfer_config
from kappa_workers.vllm.options import PeerOptions
from kappa_workers.vllm.tail_recompute import LOAD_ALL, tail_rates

# What the engine's processes report of a prompt is here so soon after its answer, most often.
_NEWS_S, _PATIENCE_S = 0.5, 30.0
ROOT = Path(__file__).parents[2]
BLOCK, CONTEXT = 32, 1184
EMULATED_CUDA = "tests.workers.vllm.emulated_cuda"
CORPUS = [f"word{i} and number {i * 7919 % 10007}" for i in range(2000)]


class Listener:
    """Collects what the engine's processes report."""

    def __init__(self, folder):
        self.stats, self.kv = f"ipc://{folder}/stats", f"ipc://{folder}/kv"
        self._messages, self._events = [], []
        context = zmq.Context.instance()
        pull, sub = context.socket(zmq.PULL), context.socket(zmq.SUB)
        pull.bind(self.stats)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(self.kv)
        threading.Thread(target=self._read, args=(pull,), daemon=True).start()
        threading.Thread(target=self._follow, args=(sub,), daemon=True).start()

    def _read(self, socket):
        while True:
            message = msgspec.msgpack.decode(socket.recv())  # before the list is looked up
            self._messages.append(message)

    def _follow(self, socket):
        from vllm.distributed.kv_events import KVEventBatch

        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        while True:
            events = decode(socket.recv_multipart()[2]).events
            self._events.extend(events)

    def take(self):
        messages, self._messages = self._messages, []
        events, self._events = self._events, []
        named = [
            {
                "type": type(event).__name__,
                "medium": getattr(event, "medium", None),
                "hashes": [str(h) for h in getattr(event, "block_hashes", ())],
            }
            for event in events
        ]
        return {"messages": messages, "events": named}


class TierEngine:
    """The engine from outside; it starts by itself, and the first request waits for that.

    `tier`: its kind (native: over an emulated CUDA), and fields of `LmcacheSettings`; `path`: more
    to import from. `peers` among the fields: it reads other engines' host tiers, and they read its
    own at `peer`."""

    def __init__(self, folder, path="", **tier):
        self.errors, self.logged = folder / "engine.txt", []
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(tier)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(path)])},
            )

    @cached_property
    def ready(self):
        """What it says of itself once it has started."""
        return self._read()

    @property
    def peer(self):
        return self.ready["peer"]

    def ask(self, tokens, salt="", plan=LOAD_ALL, params=None, count=4):
        """Compute a prompt on an empty device cache, and `count` tokens behind it."""
        asked = {"tokens": tokens, "salt": salt, "plan": plan, "count": count}
        return self._do({**asked, "params": params})

    def reports(self, **least):
        """What was reported since the last call, messages of the stats channel and KV events, once
        there are so many messages of these kinds."""
        found, deadline = self._do({"reports": True}), time.monotonic() + _PATIENCE_S
        while any(len(of_kind(found, kind)) < count for kind, count in least.items()):
            assert time.monotonic() < deadline, (least, found)
            for key, more in self._do({"reports": True}).items():
                found[key] += more
        return found

    def _do(self, what):
        assert self.ready
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            self.logged.append(line)
        raise AssertionError(f"the engine died:\n{self.errors.read_text()[-4000:]}")

    def close(self):
        self.end()
        try:
            self.process.wait(60.0)
        finally:
            self.process.kill()

    def end(self):
        """Have it end, without waiting for that."""
        self.process.stdin.close()


def of_kind(found, kind):
    """The messages of one kind among what was reported."""
    return [message for message in found["messages"] if message["kind"] == kind]


def slow_rates():
    """Of a node that loads a token as fast as it computes one."""
    shape, profile = model_shape("llama-3.1-8b"), node_profile("pcie")
    token_s = step_model(shape, profile).token_s
    link = replace(profile, h2d_bytes_per_s=kv_bytes_per_token(shape) / token_s)
    return tail_rates(shape, link)


def main():
    tier = json.loads(sys.argv[1])
    os.environ.update({**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "LMCACHE_LOG_LEVEL": "CRITICAL",
                       "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1",
                       "HF_HUB_OFFLINE": "1"})  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig

    with tempfile.TemporaryDirectory(prefix="kappa-lmcache-engine-") as folder:
        listener = Listener(folder)
        kind, peers = tier.pop("kind", "own"), tier.pop("peers", False)
        host_bytes = tier.pop("host_bytes", 1 << 26)
        disk = {name: tier.pop(name) for name in ("disk_dir", "disk_bytes") if name in tier}
        own = EngineTier(kind, EngineSettings(lmcache=tier, **disk), slow_rates())
        config = transfer_config(own, host_bytes, listener.stats)
        if kind == "native":
            extra = config["kv_connector_extra_config"]
            extra["spec_name"], extra["spec_module_path"] = "EmulatedCudaSpec", EMULATED_CUDA
        place = None
        if peers:
            place = PeerOptions(
                "127.0.0.1", free_port("127.0.0.1"), "secret", f"{folder}/peers/layout"
            )
            waits = TransferSettings(wait_s=5.0)
            meet_peers(waits, {"kv_transfer_config": config}, None, place)
        model = make_tiny_model(Path(tempfile.gettempdir()) / "kappa-lmcache-model", CORPUS)
        llm = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT,
            block_size=BLOCK, num_gpu_blocks_override=2 * CONTEXT // BLOCK + 4, max_num_seqs=4,
            max_num_batched_tokens=512, enforce_eager=True, enable_prefix_caching=True,
            disable_log_stats=True, use_tqdm_on_load=False,
            worker_cls="kappa_workers.paced.metered_worker.MeteredCPUWorker",
            additional_config={"kappa_stats": listener.stats},
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=listener.kv, topic="kv"
            ),
            kv_transfer_config=KVTransferConfig(**config),
        )  # fmt: skip
        say({"prompt_bytes": prompt_bytes(llm), "peer": place.endpoint if place else ""})
        for line in sys.stdin:
            asked = json.loads(line)
            if "reports" in asked:
                time.sleep(_NEWS_S)
                say(listener.take())
                continue
            llm.reset_prefix_cache()
            prompt = {"prompt_token_ids": asked["tokens"]}
            params = SamplingParams(
                max_tokens=asked["count"], temperature=0.0, logprobs=1, ignore_eos=True,
                extra_args={PLAN_KEY: asked["plan"], "kv_transfer_params": asked["params"]},
            )  # fmt: skip
            if asked["salt"]:
                prompt["cache_salt"] = asked["salt"]
            start_s = time.perf_counter()
            (answer,) = llm.generate([prompt], params, use_tqdm=False)
            say({
                "cached": answer.num_cached_tokens or 0,
                "tokens": list(answer.outputs[0].token_ids),
                "params": answer.kv_transfer_params,
                "logprob": answer.outputs[0].cumulative_logprob,
                "took_s": time.perf_counter() - start_s,
            })  # fmt: skip
        llm.llm_engine.engine_core.shutdown()


def prompt_bytes(llm):
    """KV bytes of a prompt as long as the context."""
    model = llm.llm_engine.vllm_config.model_config
    heads, size = model.get_total_num_kv_heads(), model.get_head_size()
    return 2 * model.hf_config.num_hidden_layers * heads * size * 4 * CONTEXT


def say(what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
