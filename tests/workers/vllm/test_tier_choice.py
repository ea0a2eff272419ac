"""The host tier that the settings name, as vLLM is told of it."""

import pytest

from workers.vllm.tier_choice import TierChoice, TierNeeds, transfer_config

NEEDS = TierNeeds(
    host_bytes=1 << 20, stats_endpoint="ipc://s", link={"order": "fifo"},
    pace={"token_s": 1e-3}, rates={"format": "f"}, host_blocks=77,
)  # fmt: skip


def extra(config):
    return config["kv_connector_extra_config"]


@pytest.mark.parametrize("kind", ["own", "lmcache", "native"])
def test_every_tier_reports_plans_and_computes_what_fails_to_load(kind):
    made = transfer_config(TierChoice(kind, "tail"), NEEDS, "tcp://127.0.0.1:1234")
    assert made["kv_role"] == "kv_both"
    assert made["kv_load_failure_policy"] == "recompute"
    assert extra(made)["kappa_stats"] == "ipc://s"
    assert extra(made)["kappa_plan"] == {"planner": "tail", "rates": {"format": "f"}}


def test_ours_has_its_spec_its_link_and_its_pace():
    made = transfer_config(TierChoice(), NEEDS)
    assert made["kv_connector"] == "HostTierConnector"
    assert extra(made)["spec_name"] == "HostTierSpec"
    assert extra(made)["kappa_link"] == {"order": "fifo"}
    assert extra(made)["kappa_pace"] == {"token_s": 1e-3}
    assert extra(made)["cpu_bytes_to_use"] == 1 << 20


def test_vllms_own_copies_keep_vllms_own_spec():
    made = transfer_config(TierChoice("native"), NEEDS)
    assert made["kv_connector"] == "HostTierConnector"
    assert "spec_name" not in extra(made) and "kappa_pace" not in extra(made)
    assert extra(made)["cpu_bytes_to_use"] == 1 << 20


def test_lmcache_is_told_its_server_and_its_bounds():
    choice = TierChoice("lmcache", timeout_s=0.5, heartbeat_s=2.0, retry_s=7.0)
    made = transfer_config(choice, NEEDS, "tcp://127.0.0.1:1234")
    assert made["kv_connector"] == "LmcacheConnector"
    told = extra(made)
    assert (told["lmcache.mp.host"], told["lmcache.mp.port"]) == ("tcp://127.0.0.1", 1234)
    assert (told["lmcache.mp.mq_timeout"], told["lmcache.mp.heartbeat_interval"]) == (0.5, 2.0)
    assert told["kappa_lmcache"] == {"timeout_s": 0.5, "retry_s": 7.0}
    assert told["kappa_most_blocks"] == 77


def test_a_shared_server_goes_before_one_of_the_workers_own():
    choice = TierChoice("lmcache", server="tcp://[::1]:99")
    made = transfer_config(choice, NEEDS, "tcp://127.0.0.1:1234")
    assert (extra(made)["lmcache.mp.host"], extra(made)["lmcache.mp.port"]) == ("tcp://[::1]", 99)
    assert choice.shared and not TierChoice("lmcache").shared
    assert extra(made)["kappa_most_blocks"] > 77


def test_without_rates_nothing_is_planned():
    needs = TierNeeds(host_bytes=1, stats_endpoint="")
    assert "kappa_plan" not in extra(transfer_config(TierChoice(planner="tail"), needs))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no server"):
        transfer_config(TierChoice("lmcache"), NEEDS)
    with pytest.raises(ValueError, match=r"'disk'.*own, lmcache or native"):
        transfer_config(TierChoice("disk"), NEEDS)
