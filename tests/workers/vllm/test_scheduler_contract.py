"""Every private name of vLLM that our scheduler relies on, by the module that does."""

import inspect

import pytest

pytestmark = pytest.mark.vllm


def parameters(function):
    return list(inspect.signature(function).parameters)


def scheduler_source():
    from vllm.v1.core.sched.scheduler import Scheduler

    return inspect.getsource(Scheduler)


# -- workers.vllm.scheduler ---------------------------------------------------------------------


def test_the_class_can_be_named_and_is_an_async_scheduler():
    from vllm.config.scheduler import SchedulerConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert "scheduler_cls" in SchedulerConfig.__annotations__
    ours = resolve_obj_by_qualname("workers.vllm.scheduler.FairScheduler")
    assert issubclass(ours, AsyncScheduler)


def test_the_methods_that_we_extend_take_what_we_pass_on():
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler.schedule) == ["self", "throttle_prefills"]
    assert parameters(Scheduler.update_from_output) == [
        "self", "scheduler_output", "model_runner_output",
    ]  # fmt: skip
    assert parameters(Scheduler.shutdown) == ["self"]
    assert parameters(Scheduler._enqueue_waiting_request) == ["self", "request"]
    assert parameters(Scheduler._free_request) == ["self", "request", "delay_free_blocks"]
    assert parameters(Scheduler._preempt_request) == [
        "self", "request", "timestamp", "drop_stale_output",
    ]  # fmt: skip


def test_requests_come_go_and_lose_their_blocks_only_through_those_methods():
    source = scheduler_source()
    added = inspect.getsource(__import__("vllm").v1.core.sched.scheduler.Scheduler.add_request)
    assert "self._enqueue_waiting_request(request)" in added
    # Both ends of a request: finished from outside, and stopped by its own output.
    assert source.count("self._free_request(request") == 2
    # Put back by a preemption, at the front.
    assert "self.waiting.prepend_request(request)" in source
    assert source.count("self.waiting.prepend_request") == 1
    assert "preempted_req = self.running.pop()" in source


def test_the_private_methods_that_we_call_exist():
    from vllm.v1.core.sched.scheduler import Scheduler

    assert parameters(Scheduler._is_blocked_waiting_status) == ["status"]
    assert parameters(Scheduler._try_promote_blocked_waiting_request) == ["self", "request"]
    assert parameters(Scheduler._request_remaining_blocks) == ["self", "request"]
    assert parameters(Scheduler._inflight_prefill_reserved_blocks) == ["self"]
    assert isinstance(Scheduler.pause_state, property)


def test_the_fields_that_we_read_exist():
    source = scheduler_source()
    for name in (
        "waiting", "skipped_waiting", "running", "requests", "policy", "block_size", "connector",
        "kv_cache_manager", "max_num_running_reqs", "max_num_scheduled_tokens", "vllm_config",
        "num_waiting_for_streaming_input", "_inflight_prefills",
    ):  # fmt: skip
        assert f"self.{name} = " in source or f"self.{name}: " in source, name


def test_a_blocked_request_is_ended_with_an_error_as_one_whose_grammar_does_not_compile():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    assert Scheduler._is_blocked_waiting_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    promote = inspect.getsource(Scheduler._try_promote_blocked_waiting_request)
    assert "if not structured_output_req or structured_output_req.grammar is None" in promote
    update = inspect.getsource(Scheduler.update_from_output)
    assert "error_req_ids = set(self.grammar_compile_error_reqs)" in update
    assert "error_req_ids, RequestStatus.FINISHED_ERROR" in update


def test_first_come_first_served_queues_are_deques():
    from collections import deque

    from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy

    assert issubclass(FCFSRequestQueue, deque)
    assert list(FCFSRequestQueue(iter("ab"))) == ["a", "b"]
    assert SchedulingPolicy.FCFS.value == "fcfs"


def test_states_of_requests_and_of_the_engine():
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    assert {"WAITING", "PREEMPTED", "RUNNING", "WAITING_FOR_REMOTE_KVS"} <= set(
        RequestStatus.__members__
    )
    assert PauseState.UNPAUSED is not None


# -- workers.vllm.engine_view -------------------------------------------------------------------


def test_requests_tell_what_we_read():
    from vllm.v1.request import Request

    source = inspect.getsource(Request)
    for name in (
        "num_computed_tokens", "num_output_placeholders", "max_tokens", "priority", "block_hashes",
        "sampling_params", "request_id", "status",
    ):  # fmt: skip
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
    for name in ("num_tokens", "num_tokens_with_spec", "num_output_tokens"):
        assert isinstance(getattr(Request, name), property)
    assert "__eq__" not in vars(Request)  # queues find a request by identity


def test_the_cache_manager_looks_prefixes_up_and_counts_what_is_missing():
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

    assert parameters(KVCacheManager.get_computed_blocks) == ["self", "request"]
    assert "blocks" in KVCacheBlocks.__annotations__
    source = inspect.getsource(KVCacheManager)
    for name in ("block_pool", "coordinator", "watermark_blocks"):
        assert f"self.{name} = " in source, name
    assert parameters(KVCacheCoordinator.get_num_blocks_to_allocate)[1:] == [
        "request_id", "num_tokens", "new_computed_blocks", "num_encoder_tokens",
        "total_computed_tokens", "num_local_computed_tokens", "num_tokens_main_model",
        "apply_admission_cap",
    ]  # fmt: skip


def test_the_pool_counts_its_blocks():
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

    source = inspect.getsource(BlockPool.__init__)
    assert "self.num_gpu_blocks = " in source
    assert "self.cached_block_hash_to_block" in source
    assert "__len__" in vars(BlockHashToBlockMap)
    assert parameters(BlockPool.get_num_free_blocks) == ["self"]
