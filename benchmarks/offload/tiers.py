"""Time to first token of one prompt from each tier of a real vLLM engine on a CPU.

    python -m benchmarks.offload.tiers --dir /data

The prompt is computed, then found on the device, in host memory, and on disk, where others pushed
it; each time with equal log-probabilities, or it is an error. The disk is read past the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kappa.settings.engine import LmcacheSettings
from workers.disk_file import measure_disk
from workers.tiny_model import make_tiny_model
from workers.vllm.arguments import CPU_ENV, EngineTier, TierChoice, transfer_config

BLOCK, BATCH = 32, 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dir", default=tempfile.gettempdir(), help="folder on the disk")
    options.add_argument("--tokens", type=int, default=4000)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    os.environ.update({**CPU_ENV, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
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


def ask(llm: Any, tokens: list[int]) -> tuple[float, float, int]:
    """Seconds to the first token of a prompt, its log-probability, and tokens that were cached."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True)
    start_s = time.perf_counter()
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    took_s = time.perf_counter() - start_s
    return took_s, float(answer.outputs[0].cumulative_logprob), answer.num_cached_tokens or 0


if __name__ == "__main__":
    main()
