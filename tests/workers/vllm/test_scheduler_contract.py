"""Every private name of vLLM that our scheduler relies on, by the module that does."""

import inspect
from collections import deque

import pytest
from vllm.config.scheduler import SchedulerConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        # kappa_workers.vllm.scheduler: methods that we extend
        (Scheduler.schedule, "throttle_prefills"),
        (Scheduler.update_from_output, "scheduler_output model_runner_output"),
        (Scheduler.shutdown, ""),
        (Scheduler._enqueue_waiting_request, "request"),
        (Scheduler._free_request, "request delay_free_blocks"),
        (Scheduler._preempt_request, "request timestamp drop_stale_output"),
        (Scheduler._handle_invalid_blocks, "invalid_block_ids num_scheduled_tokens"),
        # ... and that we call
        (KVCacheManager.evict_blocks, "block_ids"),
        (KVCacheManager.get_block_ids, "request_id"),
        (Scheduler._is_blocked_waiting_status, "status"),
        (Scheduler._try_promote_blocked_waiting_request, "request"),
        (Scheduler._request_remaining_blocks, "request"),
        (Scheduler._inflight_prefill_reserved_blocks, ""),
        # kappa_workers.vllm.engine_view
        (KVCacheManager.get_computed_blocks, "request"),
        (KVCacheCoordinator.get_num_blocks_to_allocate,
         "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens "
         "num_local_computed_tokens num_tokens_main_model apply_admission_cap"),
        (BlockPool.get_num_free_blocks, ""),
    ],
    ids=lambda given: getattr(given, "__qualname__", ""),
)  # fmt: skip
def test_methods_take_what_we_pass_on(method, parameters):
    found = [name for name in inspect.signature(method).parameters if name != "self"]
    assert found == parameters.split()


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        # kappa_workers.vllm.scheduler
        (Scheduler, "waiting skipped_waiting running requests policy block_size connector "
         "kv_cache_manager max_num_running_reqs max_num_scheduled_tokens vllm_config "
         "num_waiting_for_streaming_input _inflight_prefills scheduler_config"),
        # kappa_workers.vllm.engine_view
        (Request, "num_computed_tokens num_output_placeholders max_tokens priority block_hashes "
         "sampling_params request_id status"),
        (KVCacheManager, "block_pool coordinator watermark_blocks"),
        (BlockPool, "num_gpu_blocks cached_block_hash_to_block"),
    ],
)  # fmt: skip
def test_the_fields_that_we_read_are_set(cls, names):
    source = inspect.getsource(cls)
    for name in names.split():
        assert f"self.{name} = " in source or f"self.{name}: " in source, name


def test_the_class_can_be_named_and_is_an_async_scheduler():
    assert {"scheduler_cls", "enable_chunked_prefill"} <= SchedulerConfig.__annotations__.keys()
    ours = resolve_obj_by_qualname("kappa_workers.vllm.scheduler.FairScheduler")
    assert issubclass(ours, AsyncScheduler)


def test_vllm_moves_requests_only_through_the_wrapped_methods():
    source = inspect.getsource(Scheduler)
    added = inspect.getsource(Scheduler.add_request)
    assert "self._enqueue_waiting_request(request)" in added
    # Both ends of a request: finished from outside, and stopped by its own output.
    assert source.count("self._free_request(request") == 2
    # Put back by a preemption, at the front.
    assert "self.waiting.prepend_request(request)" in source
    assert source.count("self.waiting.prepend_request") == 1
    assert "preempted_req = self.running.pop()" in source


def test_vllm_ends_a_blocked_request_without_grammar_in_error():
    assert Scheduler._is_blocked_waiting_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    promote = inspect.getsource(Scheduler._try_promote_blocked_waiting_request)
    assert "if not structured_output_req or structured_output_req.grammar is None" in promote
    update = inspect.getsource(Scheduler.update_from_output)
    assert "error_req_ids = set(self.grammar_compile_error_reqs)" in update
    assert "error_req_ids, RequestStatus.FINISHED_ERROR" in update


def test_first_come_first_served_queues_are_deques():
    assert issubclass(FCFSRequestQueue, deque)
    assert list(FCFSRequestQueue(iter("ab"))) == ["a", "b"]
    assert SchedulingPolicy.FCFS.value == "fcfs"


def test_states_properties_and_identities_that_we_rely_on():
    states = {"WAITING", "PREEMPTED", "RUNNING", "WAITING_FOR_REMOTE_KVS"}
    assert states <= set(RequestStatus.__members__)
    assert PauseState.UNPAUSED is not None and isinstance(Scheduler.pause_state, property)
    for name in ("num_tokens", "num_tokens_with_spec", "num_output_tokens"):
        assert isinstance(getattr(Request, name), property)
    assert "__eq__" not in vars(Request)  # queues find a request by identity
    assert "blocks" in KVCacheBlocks.__annotations__
    assert "__len__" in vars(BlockHashToBlockMap)
