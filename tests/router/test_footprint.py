"""What can never fit is refused with both numbers, and only that."""

from dataclasses import replace

import pytest

from kappa.cost import StepModel
from kappa.hardware import node_profile
from kappa.protocol import Announcement
from router.errors import ApiError
from router.ingress.footprint import unfit_workers


def worker(name, blocks, context=4096, size=16):
    return Announcement(
        worker=name, model="m", node=replace(node_profile("pcie"), name=name),
        step=StepModel(1e-5, 0.0, 1e-3, 0.0), kv_bytes_per_token=1e5, emulated_model="",
        fingerprint="f", block_tokens=size, device_blocks=blocks, host_blocks=0,
        max_batch_tokens=512, max_context_tokens=context, events_endpoint="", snapshot_endpoint="",
    )  # fmt: skip


SMALL, LARGE = worker("small", 11), worker("large", 21)  # 160 and 320 tokens can be held


@pytest.mark.parametrize(
    ("prompt", "wanted", "unfit"),
    [
        (100, 60, set()),
        (100, 61, {"small"}),
        (159, 0, set()),
        (160, 0, {"small"}),
        (160, -1, {"small"}),
        (1, 319, {"small"}),
    ],
)
def test_workers_that_cannot_hold_prompt_and_answer_are_named(prompt, wanted, unfit):
    assert unfit_workers([SMALL, LARGE], prompt, wanted) == unfit


@pytest.mark.parametrize(
    ("prompt", "wanted", "param", "blocks"), [(10, 311, "max_tokens", 21), (900, 0, "messages", 57)]
)
def test_what_no_worker_can_hold_is_refused_with_both_numbers(prompt, wanted, param, blocks):
    with pytest.raises(ApiError) as caught:
        unfit_workers([SMALL, LARGE], prompt, wanted)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "footprint_too_large", param)
    assert f"takes {blocks} blocks" in error.message and "has 20" in error.message


def test_a_context_that_is_too_short_is_told_as_such():
    with pytest.raises(ApiError, match="context is 200 tokens, the request needs 210") as caught:
        unfit_workers([worker("a", 500, context=200), worker("b", 2, context=100)], 200, 10)
    assert caught.value.code == "context_length_exceeded"


def test_a_worker_with_room_but_a_short_context_does_not_help_one_with_neither():
    with pytest.raises(ApiError) as caught:
        unfit_workers([worker("deep", 11, context=4096), worker("short", 500, context=100)], 200, 1)
    assert caught.value.code in ("footprint_too_large", "context_length_exceeded")


def test_without_workers_nothing_is_known_to_be_too_large():
    assert unfit_workers([], 10**6, 1) == frozenset()
