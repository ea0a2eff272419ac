"""Time to first token of one prompt from each tier of a real vLLM engine on a CPU.

    python -m benchmarks.offload.tiers --dir /data

The prompt is computed, then found on the device, in host memory, and on disk, where others pushed
it; each time with equal log-probabilities, or it is an error. The disk is read past the page cache.

    python -m benchmarks.offload.tiers --layers --out FILE

A prefix comes over a paced link ahead of its prompt, and layer by layer in the prompt's own step
(`engine.load`), where that load lasts a third of computing the rest, as long, and three times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import publish, result
from kappa.protocol import PLAN_KEY
from kappa.settings.engine import LmcacheSettings
from workers.disk_file import measure_disk
from workers.tiny_model import make_tiny_model
from workers.vllm.arguments import CPU_ENV, EngineTier, TierChoice, transfer_config
from workers.vllm.options import LinkPace, LinkRules

BLOCK, BATCH = 32, 1024
_CACHED, _NEW, _LOAD_OVER_COMPUTE = 1024, 192, (1 / 3, 1.0, 3.0)
# A Llama of 12 layers and 43 million weights, nearly zero: time does not depend on them.
_LAYERED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dir", default=tempfile.gettempdir(), help="folder on the disk")
    options.add_argument("--tokens", type=int, default=4000)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--layers", action="store_true", help="loads ahead and by layers")
    options.add_argument("--out", type=Path, help="with --layers: write the result here, as JSON")
    given = options.parse_args()
    os.environ.update({**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
    if given.layers:
        found = by_layers(given.repeats)
        publish(found, lambda console: show(found, console), json_output=False, out=given.out)
        return
    llm, block_bytes = engine(given.dir, given.tokens)
    disk = measure_disk(Path(given.dir), block_bytes)
    print(f"disk, {'O_DIRECT' if disk['direct'] else 'through the page cache'}:")
    for row in disk["read"]:
        print(f"  {row['bytes'] / 1e6:8.3f} MB {row['bytes_per_s'] / 1e6:8.0f} MB/s")
    rng, seconds = random.Random(0), dict[str, list[float]]()
    for repeat in range(given.repeats):
        tokens = [rng.randrange(100, 4000) for _ in range(given.tokens)]
        answers = {"computed": ask(llm, tokens), "device": ask(llm, tokens)}
        llm.reset_prefix_cache()
        answers["host"] = ask(llm, tokens)
        for _ in range(3):  # host memory holds two and a half of them
            ask(llm, [rng.randrange(100, 4000) for _ in range(given.tokens)])
        time.sleep(1.0)
        llm.reset_prefix_cache()
        answers["disk"] = ask(llm, tokens)
        for source, (took_s, logprob, cached) in answers.items():
            assert abs(logprob - answers["computed"][1]) < 1e-4, (source, logprob)
            assert cached >= (source != "computed") * (given.tokens // BLOCK - 1) * BLOCK, source
            if repeat:  # the first warms up
                seconds.setdefault(source, []).append(took_s)
    for source, took in seconds.items():
        print(f"{source:>9}: {1e3 * statistics.median(took):8.1f} ms")
    llm.llm_engine.engine_core.shutdown()


def engine(folder: str, tokens: int) -> tuple[Any, int]:
    """An engine whose host memory holds two and a half prompts; bytes of one of its blocks."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    corpus = [f"word{i} and number {i * 7919 % 10007}" for i in range(2000)]
    model = make_tiny_model(Path(tempfile.gettempdir()) / "kappa-tiers-model", corpus)
    blocks, block_bytes = tokens // BLOCK + 2, 16384
    choice = TierChoice("own", "kv", LmcacheSettings(), folder, 64 * blocks * block_bytes)
    host_bytes = int(2.5 * blocks * block_bytes)
    config = transfer_config(EngineTier(choice), host_bytes, "")
    llm = LLM(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=tokens + BLOCK,
        block_size=BLOCK, num_gpu_blocks_override=2 * blocks, max_num_batched_tokens=BATCH,
        enforce_eager=True, disable_log_stats=True, kv_transfer_config=KVTransferConfig(**config),
        worker_cls="workers.vllm.metered_worker.MeteredCPUWorker",
    )  # fmt: skip
    return llm, block_bytes


def by_layers(repeats: int) -> dict[str, Any]:
    """Rows of medians by how long the load lasts. The engine is in this process, so that the pace
    of its link and the way it loads can change, and the device's blocks be overwritten; rounds take
    turns."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.pop("KAPPA_DIE_WITH_PARENT")
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    with tempfile.TemporaryDirectory(prefix="kappa-layers-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LAYERED), encoding="utf-8")
        tier = EngineTier(TierChoice(), link=LinkRules(by_layer=True))
        llm: Any = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32",
            max_model_len=2048, block_size=BLOCK, num_gpu_blocks_override=130, enforce_eager=True,
            max_num_batched_tokens=2048, disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer_config(tier, 1 << 30, "")),
            worker_cls="workers.vllm.metered_worker.MeteredCPUWorker",
        )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    copies, rng = get_kv_transfer_group()._kappa_tier(), random.Random(0)

    def timed(prompt: list[int], load: str, load_s: float) -> float:
        ask(llm, [7] * (BLOCK // 2))  # what is to be stored is stored
        assert llm.reset_prefix_cache()
        for tensor in copies.device:
            tensor.fill_(1)
        copies.pace, scheduler.connector._kappa_by_layer = LinkPace(), False
        if load == "device":
            ask(llm, prompt[:_CACHED])
        else:
            copies.pace = LinkPace(token_s=load_s / _CACHED)
            scheduler.connector._kappa_by_layer = load == "layers"
        took_s, _, cached = ask(llm, prompt, f"load={0 if load == 'device' else _CACHED}")
        assert cached == _CACHED, (load, cached)
        return took_s

    rows, computed_s = list[dict[str, Any]](), 0.0
    for ratio in (0.0, *_LOAD_OVER_COMPUTE):
        found: dict[str, list[float]] = {"device": [], "ahead": [], "layers": []}
        for repeat in range(repeats + 1):
            prompt = [rng.randrange(100, 4000) for _ in range(_CACHED + _NEW)]
            ask(llm, prompt)
            for load, all_s in found.items():
                took_s = timed(prompt, load, ratio * computed_s)
                all_s += [took_s] if repeat else []  # the first warms up
        median = {load: statistics.median(seconds) for load, seconds in found.items()}
        if not ratio:  # to choose the loads by
            computed_s = median["device"]
            continue
        load_s, compute_s = ratio * computed_s, median["device"]
        least_s = max(load_s, compute_s) + min(load_s, compute_s) / _LAYERED["num_hidden_layers"]
        row = {"load_s": load_s, "eq4_s": least_s, **{f"{k}_s": v for k, v in median.items()}}
        rows.append({**row, "over_eq4": median["layers"] / least_s, "all_s": found})
    llm.llm_engine.engine_core.shutdown()
    return result(cached=_CACHED, new=_NEW, model=_LAYERED, repeats=repeats, rows=rows)


def show(facts: dict[str, Any], console: Any) -> None:
    names = ("load_s", "device_s", "ahead_s", "layers_s", "eq4_s", "over_eq4")
    console.print(*(f"{name:>10}" for name in names))
    for row in facts["rows"]:
        console.print(*(f"{row[name]:10.3f}" for name in names))


def ask(llm: Any, tokens: list[int], plan: str = "") -> tuple[float, float, int]:
    """Seconds to the first token of a prompt, its log-probability, and tokens that were cached."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True, extra_args={PLAN_KEY: plan}
    )
    start_s = time.perf_counter()
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    took_s = time.perf_counter() - start_s
    return took_s, float(answer.outputs[0].cumulative_logprob), answer.num_cached_tokens or 0


if __name__ == "__main__":
    main()
