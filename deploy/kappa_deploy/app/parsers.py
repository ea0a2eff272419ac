"""Which of vLLM's parsers read a model's tool calls and its reasoning: named, or by its family.

A parser of another family's marks finds nothing, takes an answer for a thought, or ends every
request, where it looks for tokens that the tokenizer lacks. So one is taken only where the model's
chat template writes the marks that it reads. vLLM's names; a contract test holds them.
"""

from __future__ import annotations

from typing import Any

from kappa.settings.engine import EngineSettings

_HERMES = ("hermes", "<tool_call>")
_CODER = ("qwen3_coder", "<function=")
_R1 = ("deepseek_r1", "<think>")

TOOL_PARSERS: dict[str, tuple[tuple[str, str], ...]] = {
    "llama": (("llama3_json", "<|python_tag|>"), _HERMES),
    "llama4": (("llama4_pythonic", "tools"),),
    "mistral": (("mistral", "[TOOL_CALLS]"), _HERMES),
    "mixtral": (("mistral", "[TOOL_CALLS]"),),
    "qwen2": (_HERMES,), "qwen2_moe": (_HERMES,), "qwen2_5_vl": (_HERMES,),
    "qwen3": (_CODER, _HERMES), "qwen3_moe": (_CODER, _HERMES), "qwen3_next": (_CODER, _HERMES),
    "qwen3_vl": (_HERMES,), "qwen3_vl_moe": (_HERMES,), "qwen3_5": (_CODER,),
    "qwen3_5_moe": (_CODER,), "smollm3": (_HERMES,),
    "deepseek_v3": (("deepseek_v3", "```json"), ("deepseek_v31", "<｜tool▁calls▁begin｜>")),
    "kimi_k2": (("kimi_k2", "<|tool_calls_section_begin|>"),),
    "glm4_moe": (("glm45", "<arg_key>"),), "minimax_m2": (("minimax_m2", "<minimax:tool_call>"),),
    "gpt_oss": (("openai", "<|channel|>"),), "phi3": (("phi4_mini_json", "<|tool|>"),),
    "granite": (("granite", "<|tool_call|>"),), "granitemoehybrid": (("granite4", "<tool_call>"),),
    "seed_oss": (("seed_oss", "<seed:tool_call>"),),
}  # fmt: skip
"""By `model_type`: parsers, each with what a template of its models holds; the first that fits."""

REASONING_PARSERS: dict[str, tuple[tuple[str, str], ...]] = {
    "llama": (_R1,), "qwen2": (_R1,), "mistral": (("mistral", "[THINK]"),),
    "qwen3": (("qwen3", "<think>"),), "qwen3_moe": (("qwen3", "<think>"),),
    "qwen3_next": (("qwen3", "<think>"),), "qwen3_vl": (("qwen3", "<think>"),),
    "qwen3_vl_moe": (("qwen3", "<think>"),), "qwen3_5": (("qwen3", "<think>"),),
    "qwen3_5_moe": (("qwen3", "<think>"),),
    "deepseek_v3": (("deepseek_v3", "thinking"), _R1), "kimi_k2": (("kimi_k2", "<think>"),),
    "glm4_moe": (("glm45", "<think>"),), "minimax_m2": (("minimax_m2", "<think>"),),
    "gpt_oss": (("openai_gptoss", "<|channel|>"),), "granite": (("granite", "thinking"),),
    "seed_oss": (("seed_oss", "<seed:think>"),),
}  # fmt: skip
"""The same of reasoning."""


def parser_arguments(engine: EngineSettings, family: str, chat_template: str) -> dict[str, Any]:
    """vLLM's arguments for the parsers of a model; empty where it has none, or another engine."""
    if engine.kind != "vllm":
        return {}
    found: dict[str, Any] = {}
    for name, chosen, table in (
        ("tool_call_parser", engine.tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", engine.reasoning_parser, REASONING_PARSERS),
    ):
        fitting = (p for p, mark in table.get(family.lower(), ()) if mark in chat_template)
        parser = next(fitting, "none") if chosen == "auto" else chosen
        if parser != "none":
            found[name] = parser
    if "tool_call_parser" in found:
        found["enable_auto_tool_choice"] = True
    # What `engine.extra` says goes before.
    return {name: value for name, value in found.items() if name not in engine.extra}
