"""What an engine of `kappa bench scheduler` is asked for, and how its own speed is found."""

from types import SimpleNamespace

import pytest

from kappa_benchmarks.scheduling import mix
from kappa_workers.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("runs")]
SETTING = mix.Setting("mixed", "x1", "shared")


@pytest.fixture(scope="module")
def runs():
    """The module, which changes the environment as it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        from kappa_benchmarks.scheduling import vllm_runs

        yield vllm_runs


def paces(arguments):
    """All that would slow it down: of steps, of transfers, of what the rule is told."""
    additional = arguments["additional_config"]
    connector = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    return (
        additional.get("kappa_pace"),
        connector.get("kappa_pace"),
        additional["kappa_scheduler"]["link"],
    )


def test_a_real_engine_has_no_pace_and_room_for_every_prefix(runs, tmp_path):
    model = make_tiny_model(tmp_path / "model", ["some words"])
    asked = runs.engine_arguments(
        "fair", SETTING, runs.Serving(str(model), paced=False), tmp_path, blocks=39
    )
    assert asked["model"] == str(model) and paces(asked) == (None, None, None)
    # 2 layers, keys and values of 32 floats: 512 bytes a token; 6 x 528 and 12 x 96 tokens, twice.
    extra = asked["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2 * 512 * (6 * 528 + 12 * 96)
    assert (asked["num_gpu_blocks_override"], asked["block_size"]) == (40, mix.BLOCK_TOKENS)


def test_a_paced_engine_has_all_of_them_dilated(runs, tmp_path):
    asked = runs.engine_arguments("fair", SETTING, runs.Serving(dilation=2.0), tmp_path, blocks=39)
    step, transfers, rule = paces(asked)
    assert step["dilation"] == 2.0
    token_s = 2.0 * mix.KV_BYTES_PER_TOKEN / mix.LINK_BYTES_PER_S
    assert rule["token_s"] == transfers["token_s"] == pytest.approx(token_s)


async def test_the_dilation_of_a_real_engine_is_that_of_a_full_step(runs, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(runs.time, "monotonic", lambda: clock.now)
    took_s, prompts = [9.0, 0.6, 0.4, 0.5], []

    class Llm:
        async def generate(self, prompt, params, name):
            prompts.append(tuple(prompt["prompt_token_ids"]))
            clock.now += took_s[len(prompts) - 1]
            yield None

    engine = runs.Engine.__new__(runs.Engine)
    engine._llm = Llm()
    # The first is slow once; an emulated full step lasts 5 ms and 256 times 40 us.
    assert await engine.measured_dilation() == pytest.approx(0.5 / 0.01524)
    assert len(set(prompts)) == 4 and {len(one) for one in prompts} == {mix.BUDGET_TOKENS}
