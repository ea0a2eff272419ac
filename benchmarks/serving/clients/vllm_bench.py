"""vLLM's own benchmark client, from the vLLM that is installed beside us: called as a module.

The `vllm` command does not start in CPU builds, whose distribution has another name; its benchmark
client does. It times from before it asks its pool for a connection, and it takes the finish event,
which holds no text, for one more chunk: its gaps have one entry too many.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.clients.common import Answer, ClientError, Plan, Played, run

NAME = "vllm bench"
SCRIPT = Path(__file__).with_name("scripts") / "vllm_serve.py"
_EVEN = 1e6
"""Shape of the gamma distribution of its arrivals: at this they are evenly apart."""


def play(plan: Plan, python: Path, folder: Path) -> Played:
    """Have it send the plan; `folder` is empty and stays behind with its files.

    Raises:
        ClientError: it failed, or its result cannot be read.
    """
    data = folder / "prompts.jsonl"
    rows = ({"prompt": p, "output_tokens": plan.output_tokens} for p in plan.prompts)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    _, cpu_s = run(NAME, command(plan, python, data, folder), plan.timeout_s, offline)
    return read(folder / "result.json", cpu_s)


def command(plan: Plan, python: Path, data: Path, folder: Path) -> list[str]:
    """Its command line."""
    pace = (
        ["--max-concurrency", str(plan.concurrency), "--request-rate", "inf"]
        if plan.concurrency is not None
        else ["--request-rate", f"{plan.rate_rps:g}", "--burstiness", f"{_EVEN:g}"]
    )
    return [
        str(python), str(SCRIPT), "--backend", "openai", "--base-url", plan.url,
        "--endpoint", "/v1/completions", "--model", plan.model, "--tokenizer", plan.tokenizer,
        "--dataset-name", "custom", "--dataset-path", str(data), "--custom-output-len", "-1",
        "--skip-chat-template", "--disable-shuffle", "--num-prompts", str(len(plan.prompts)),
        *pace, "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result",
        "--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip


def read(path: Path, cpu_s: float = math.nan) -> Played:
    """What its result says.

    Raises:
        ClientError: it is not there, or not as vLLM 0.29 writes it.
    """
    try:
        result = json.loads(path.read_bytes())
        return _played(result, cpu_s)
    except OSError as error:
        raise ClientError(f"{NAME} left no {path.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ClientError(f"{NAME}: {path}: not as vLLM 0.29 writes it: {error!r}") from None


def _played(result: Mapping[str, Any], cpu_s: float) -> Played:
    answers: list[Answer] = []
    gaps: list[float] = []
    failed = 0
    for ttft_s, itl_s, tokens, error in zip(
        result["ttfts"], result["itls"], result["output_lens"], result["errors"], strict=True
    ):
        if error or not tokens:
            failed += 1
            continue
        decode_s = math.fsum(itl_s)
        tpot_s = decode_s / (tokens - 1) if tokens > 1 else math.nan
        answers.append(Answer(ttft_s, tpot_s, ttft_s + decode_s))
        # The last one leads to the finish event, not to a token.
        gaps += itl_s[: tokens - 1]
    return Played(tuple(answers), failed, float(result["duration"]), tuple(gaps), cpu_s)
