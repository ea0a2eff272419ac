"""Parsers of tool calls and of reasoning: named, by family, or none."""

import dataclasses
from typing import get_args

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from kappa.settings.cluster import ClusterSettings
from kappa.settings.engine import EngineSettings, ReasoningParserName, ToolCallParserName
from kappa.shapes import model_shape
from kappa_deploy.app.model import Model
from kappa_deploy.app.parsers import REASONING_PARSERS, TOOL_PARSERS, parser_arguments
from kappa_deploy.app.plan import pool_config

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

HERMES = "{% if tools %}<tool_call>{% endif %}"
BOTH = HERMES + "<think>\n\n</think>"


def arguments(family, template, **engine):
    return parser_arguments(EngineSettings(**engine), family, template)


@pytest.mark.parametrize(
    ("settings", "table", "registered"),
    [
        (ToolCallParserName, TOOL_PARSERS, ToolParserManager.list_registered()),
        (ReasoningParserName, REASONING_PARSERS, ReasoningParserManager.list_registered()),
    ],
)
def test_the_names_are_those_that_vllm_registers(settings, table, registered):
    assert {*get_args(settings)} == {"auto", "none", *registered}
    assert {parser for of_one in table.values() for parser, _ in of_one} <= {*registered}


@pytest.mark.parametrize(
    ("family", "template", "tools", "reasoning"),
    [
        ("qwen3", BOTH, "hermes", "qwen3"),
        # Without thoughts all of an answer would be taken for one.
        ("qwen3", HERMES, "hermes", None),
        ("qwen3_moe", "<function=x>", "qwen3_coder", None),
        ("llama", "{{ '<|python_tag|>' }}", "llama3_json", None),
        ("llama", "<think>", None, "deepseek_r1"),
        # SmolLM2 is of Llama's family and has none of its marks.
        ("llama", "<|im_start|>", None, None),
        ("somebody_elses", BOTH, None, None), ("", "", None, None),
    ],
)  # fmt: skip
def test_a_models_family_and_template_choose_its_parsers(family, template, tools, reasoning):
    found = arguments(family, template)
    assert (found.get("tool_call_parser"), found.get("reasoning_parser")) == (tools, reasoning)
    assert found.get("enable_auto_tool_choice") == (True if tools else None)


def test_named_parsers_precede_the_familys_and_extra_all():
    named = arguments("qwen3", BOTH, tool_call_parser="xlam", reasoning_parser="none")
    assert named == {"tool_call_parser": "xlam", "enable_auto_tool_choice": True}
    mine = {"tool_call_parser": "my_plugins"}
    assert arguments("qwen3", HERMES, extra=mine) == {"enable_auto_tool_choice": True}
    assert arguments("qwen3", BOTH, kind="torch") == {}
    with pytest.raises(ValueError, match="'hermes'"):
        EngineSettings(tool_call_parser="hermess")


@pytest.mark.usefixtures("no_ray_starts")
def test_a_pools_engine_gets_them():
    settings = ClusterSettings()
    pool = settings.all_pools[0]
    model = Model("x", model_shape("llama-3.1-8b"), BOTH, family="qwen3")
    config = pool_config(settings, pool, model)
    given = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    assert config["engine_kwargs"].items() >= {**given, "reasoning_parser": "qwen3"}.items()
    # As Ray divides them: by the class that has a field of the name.
    assert given.keys() <= {field.name for field in dataclasses.fields(FrontendArgs)}
    assert hasattr(AsyncEngineArgs, "reasoning_parser")
