"""The scheduling benchmark on a real engine: the host tier gives back what it was given."""

import pytest

from tests.turns import by_turns

pytestmark = [pytest.mark.live, pytest.mark.vllm, by_turns(__file__)]


@pytest.mark.usefixtures("fresh_environment")
@pytest.mark.parametrize(("policy", "paced"), [("fcfs_link", True), ("fair", False)])
async def test_answers_do_not_depend_on_where_a_prefix_came_from(policy, paced):
    """Paced, a shared link so slow that stores are dropped while prefixes are loaded."""
    from kappa_benchmarks.scheduling import mix
    from kappa_benchmarks.scheduling.vllm_runs import Engine, Serving

    serving = Serving(paced=paced, dilation=1.0 if paced else 0.0)
    engine = Engine(policy, mix.Setting("mixed", "x1", "shared"), serving)
    try:
        if not paced:
            engine.dilation = await engine.measured_dilation()
            assert engine.dilation > 0
        loaded, computed = await engine.play(0), await engine.play(0, offloaded=False)
    finally:
        engine.close()
    for run, found in ((loaded, 512), (computed, 0)):
        prompts = [s for s in run.served if s.request.prefix_tokens]
        assert [s.cached_tokens for s in prompts] == [found] * 6
        assert all(len(s.tokens) == mix.OUTPUT_TOKENS for s in run.served)
        assert all(s.arrived_s <= s.admitted_s <= s.first_s <= s.finished_s for s in run.served)
    assert loaded.engine["loads_made"] >= 6
    assert loaded.engine["stores_dropped"] + loaded.engine["stores_made"] >= 12
    assert [s.tokens for s in loaded.served] == [s.tokens for s in computed.served]
