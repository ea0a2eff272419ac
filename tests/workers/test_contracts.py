"""Every name of vLLM and Ray that is private, or not promised, and that our adapters rely on.

When an upgrade breaks one, the test that fails says which adapter to look at.
"""

import dataclasses
import inspect

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def parameters(function):
    return list(inspect.signature(function).parameters)


def source_of(cls):
    """Source of a class and of what it inherits."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] in ("ray", "vllm")]
    return "".join(inspect.getsource(base) for base in own)


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


# -- workers.vllm_plugin -----------------------------------------------------------------------


def test_spin_condition_ends_with_its_busy_loop_default():
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    assert parameters(SpinCondition.__init__)[-1] == "busy_loop_s"
    assert SpinCondition.__init__.__defaults__ is not None


# -- workers.vllm.connector ---------------------------------------------------------------------


def test_the_offloading_connector_has_the_methods_that_we_extend():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector as Connector,
    )

    assert parameters(Connector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]
    assert parameters(Connector.get_num_new_matched_tokens)[1:] == [
        "request", "num_computed_tokens",
    ]  # fmt: skip
    assert parameters(Connector.update_state_after_alloc)[1:] == [
        "request", "blocks", "num_external_tokens",
    ]  # fmt: skip
    assert parameters(Connector.request_finished)[1:] == ["request", "block_ids"]
    assert parameters(Connector.request_finished_all_groups)[1:] == ["request", "block_ids"]


def test_connector_roles_and_requests_have_what_we_read():
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.request import Request

    assert KVConnectorRole.SCHEDULER != KVConnectorRole.WORKER
    source = inspect.getsource(Request.__init__)
    assert all(f"self.{name}" in source for name in ("num_prompt_tokens", "sampling_params"))
    assert SamplingParams(extra_args={"a": 1}).extra_args == {"a": 1}


def test_the_ingress_mark_reaches_sampling_params():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    assert "vllm_xargs" in ChatCompletionRequest.model_fields
    assert "extra_args" in inspect.getsource(ChatCompletionRequest.to_sampling_params)


def test_the_connector_tells_its_scheduler_which_jobs_ended_and_keeps_their_keys():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, events, scheduler
    from vllm.v1.outputs import KVConnectorOutput

    assert list(common.OffloadingWorkerMetadata.__annotations__) == [
        "completed_jobs", "transfer_stats",
    ]  # fmt: skip
    assert fields(KVConnectorOutput) >= {"kv_connector_worker_meta"}
    assert "keys" in scheduler.TransferJobStatus.__annotations__
    assert "load_jobs" in common.OffloadingConnectorMetadata.__annotations__
    assert "req_id" in common.TransferJob.__annotations__
    # What a load took is told under the id that the scheduler's steps name a request by.
    made = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "TransferJob(\n            req_id=request.request_id" in made
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    for name in ("manager", "_jobs", "_events_tracker"):
        assert f"self.{name}" in source, name
    assert "self._pending_event_metadata" in inspect.getsource(events.OffloadingEventsTracker)


def test_vllm_takes_a_shorter_hit_and_keeps_what_a_waiting_request_will_load():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    states = scheduler.RequestOffloadState
    assert "partial_tail_boundary" in states.__annotations__
    assert parameters(states.update_num_hit_chunks) == ["self", "num_cached_tokens"]
    assert "self._req_status" in inspect.getsource(scheduler.OffloadingConnectorScheduler)
    # What a waiting request will load is kept.
    assert parameters(states.update_offload_keys) == ["self"]
    assert parameters(scheduler.OffloadingConnectorScheduler._touch) == ["self", "req_status"]


# -- workers.vllm.lmcache ----------------------------------------------------------------------


def test_connectors_of_vllm_are_asked_what_our_shell_answers():
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput

    from workers.vllm.lmcache.connector import LmcacheConnector

    assert issubclass(LmcacheConnector, SupportsHMA)
    assert not LmcacheConnector.__abstractmethods__
    for name in (
        "register_kv_caches", "handle_preemptions", "wait_for_save", "get_finished",
        "get_block_ids_with_load_errors", "build_connector_worker_meta", "take_events",
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
        "update_connector_output", "request_finished", "shutdown", "reset_cache",
    ):  # fmt: skip
        theirs = parameters(getattr(KVConnectorBase_V1, name))
        assert parameters(getattr(LmcacheConnector, name))[: len(theirs)] == theirs, name
    assert parameters(KVConnectorWorkerMetadata.aggregate) == ["self", "other"]
    assert fields(KVConnectorOutput) >= {"invalid_block_ids", "kv_connector_worker_meta"}


def test_a_failed_load_can_be_computed_instead():
    from vllm.config import KVTransferConfig

    assert KVTransferConfig(kv_load_failure_policy="recompute").kv_load_failure_policy
    assert "kv_load_failure_policy" in fields(KVTransferConfig)


# -- workers.vllm.host_tier --------------------------------------------------------------------


def test_the_cpu_manager_has_what_ours_extends():
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    from workers.vllm.host_tier_manager import HostTierManager

    for name in ("prepare_store", "complete_store", "reset_cache"):
        theirs, ours = getattr(CPUOffloadingManager, name), getattr(HostTierManager, name)
        assert parameters(ours) == parameters(theirs)
    source = inspect.getsource(CPUOffloadingManager)
    assert all(f"self.{name}" in source for name in ("_policy", "_get_load_store_spec"))
    assert parameters(CPUOffloadingManager.__init__)[:5] == [
        "self", "num_blocks", "cache_policy", "cache_policy_module_path", "enable_events",
    ]  # fmt: skip
    made = inspect.getsource(CPUOffloadingSpec.get_manager)
    assert all(n in made for n in ("_manager", "eviction_policy", "cache_policy_module_path"))


def test_the_cpu_spec_tells_sizes_and_takes_our_worker():
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    source = inspect.getsource(CPUOffloadingSpec) + inspect.getsource(OffloadingSpec)
    for name in ("extra_config", "num_blocks", "blocks_per_chunk", "tokens_per_block"):
        assert f"self.{name}" in source, name
    assert parameters(CPUOffloadingSpec.get_worker) == ["self", "kv_caches"]


def test_the_offloading_worker_asks_for_no_more_than_we_have():
    from vllm.v1.kv_offload.base import OffloadingWorker

    from workers.vllm.host_tier import HostTierWorker

    assert OffloadingWorker.__abstractmethods__ <= set(vars(HostTierWorker))
    for name in ("submit_store", "submit_load"):
        theirs, ours = getattr(OffloadingWorker, name), getattr(HostTierWorker, name)
        assert parameters(ours) == parameters(theirs)


def test_transfer_types_have_the_fields_that_we_use():
    from vllm.v1.kv_offload import base

    assert fields(base.CanonicalKVCacheTensor) >= {"tensor", "page_size_bytes"}
    assert fields(base.CanonicalKVCaches) >= {"tensors"}
    assert list(base.TransferResult.__annotations__) == [
        "job_id", "success", "transfer_size", "transfer_time",
    ]  # fmt: skip
    assert parameters(base.BlockIDsLoadStoreSpec.__init__) == ["self", "block_ids"]


# -- workers.vllm.metered_worker ---------------------------------------------------------------


def test_the_cpu_worker_runs_and_samples_in_two_calls():
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert parameters(CPUWorker.execute_model) == ["self", "scheduler_output"]
    assert parameters(CPUWorker.sample_tokens) == ["self", "grammar_output"]


def test_the_scheduler_output_tells_each_requests_tokens():
    from vllm.config import VllmConfig
    from vllm.v1.core.sched import output

    assert fields(output.SchedulerOutput) >= {
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "total_num_scheduled_tokens", "finished_req_ids",
    }  # fmt: skip
    assert fields(output.NewRequestData) >= {
        "req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens",
    }  # fmt: skip
    assert fields(output.CachedRequestData) >= {"req_ids", "num_computed_tokens"}
    assert "additional_config" in VllmConfig.__annotations__


# -- workers.mirror, workers.vllm.arguments ----------------------------------------------------


def test_kv_events_have_the_fields_that_mirror_and_decoder_know():
    from vllm.distributed import kv_events

    assert kv_events.BlockStored.__struct_fields__[:7] == (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    )  # fmt: skip
    assert "extra_keys" in kv_events.BlockStored.__struct_fields__
    assert kv_events.BlockRemoved.__struct_fields__[:2] == ("block_hashes", "medium")
    assert kv_events.KVEventBatch.__struct_fields__[:2] == ("ts", "events")


def test_every_engine_argument_that_we_set_exists():
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kappa.hardware import node_profile
    from kappa.shapes import model_shape
    from workers.vllm.arguments import (
        Endpoints,
        EngineLimits,
        EngineScheduler,
        Pace,
        engine_kwargs,
    )

    limits = EngineLimits(4096, 32, 200, 1 << 20, 1024, 8, "float32")
    pace = Pace(model_shape("llama-3.1-8b"), node_profile("pcie"))
    given = engine_kwargs(limits, Endpoints("ipc://a", "ipc://b"), pace, EngineScheduler("fair"))
    assert "scheduler_cls" in given
    assert set(given) <= fields(AsyncEngineArgs)


def test_the_classes_that_we_name_as_text_exist():
    import importlib

    for path in (
        "workers.vllm.metered_worker.MeteredCPUWorker", "workers.vllm.connector.HostTierConnector",
        "workers.vllm.host_tier.HostTierSpec", "workers.no_download.NoDownload",
        "router.ray_router.KappaRouter", "workers.vllm.scheduler.FairScheduler",
    ):  # fmt: skip
        module, name = path.rsplit(".", 1)
        assert inspect.isclass(getattr(importlib.import_module(module), name))


def test_environment_variables_of_vllm_that_we_set_are_known_to_it():
    import vllm.envs

    from workers.vllm.arguments import CPU_ENV

    ours = {name for name in CPU_ENV if name.startswith("VLLM_")}
    assert ours <= set(vllm.envs.environment_variables)


# -- workers.replica, workers.no_download ------------------------------------------------------


def test_the_llm_server_has_the_methods_that_we_override():
    from ray.serve.llm.deployment import LLMServer

    assert parameters(LLMServer._batch_output_stream) == ["self", "generator"]
    assert parameters(LLMServer._start_engine) == ["self"]
    assert parameters(LLMServer.record_routing_stats) == ["self"]
    assert parameters(LLMServer.collective_rpc)[:4] == ["self", "method", "timeout", "args"]
    assert inspect.iscoroutinefunction(LLMServer.__init__)
    source = source_of(LLMServer)
    assert "self._llm_config" in source and "self.engine" in source


def test_the_front_end_counts_what_the_engine_has_not_answered():
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
    from ray.serve.llm.deployment import LLMServer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    assert inspect.iscoroutinefunction(LLMServer.check_health)
    assert "self._engine_client = self._start_async_llm_engine" in source_of(VLLMEngine)
    assert "self.output_processor = OutputProcessor(" in source_of(AsyncLLM)
    assert parameters(OutputProcessor.get_num_unfinished_requests) == ["self"]


def test_the_llm_config_takes_engine_arguments_late_and_callbacks():
    from ray.serve.llm import LLMConfig

    assert callable(LLMConfig.update_engine_kwargs)
    for name in ("callback_config", "placement_group_config", "accelerator_config",
                 "log_engine_metrics", "runtime_env", "deployment_config"):  # fmt: skip
        assert name in LLMConfig.model_fields


def test_the_replica_context_tells_id_and_rank():
    from ray.serve.context import ReplicaContext

    assert fields(ReplicaContext) >= {"replica_id", "rank"}


def test_a_callback_can_switch_the_download_off():
    from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackCtx

    assert CallbackCtx().run_init_node is True
    assert parameters(CallbackBase.on_before_node_init) == ["self"]


# -- router.ray_router -------------------------------------------------------------------------


def test_the_request_router_has_the_methods_that_we_override():
    from ray.serve.request_router import RequestRouter

    assert parameters(RequestRouter.update_replicas)[:2] == ["self", "replicas"]
    assert parameters(RequestRouter.on_replica_actor_died)[:2] == ["self", "replica_id"]
    assert parameters(RequestRouter.choose_replicas)[:3] == [
        "self", "candidate_replicas", "pending_request",
    ]  # fmt: skip
    assert parameters(RequestRouter.on_request_completed) == [
        "self", "replica_id", "internal_request_id",
    ]  # fmt: skip
    assert parameters(RequestRouter._remove_pending_request_from_indices) == [
        "self", "pending_request",
    ]  # fmt: skip
    # A request whose future has an answer is passed over at the next look at its candidates.
    assert "pending_request.future.done()" in inspect.getsource(
        RequestRouter._fulfill_pending_requests
    )
    assert "kwargs" in parameters(RequestRouter.initialize_state)
    assert "self._deployment_id" in inspect.getsource(RequestRouter.__init__)


def test_replicas_and_requests_tell_what_the_router_reads():
    from ray.serve._private.common import ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest, RunningReplica

    assert isinstance(RunningReplica.routing_stats, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert "unique_id" in fields(ReplicaID)
    assert fields(PendingRequest) >= {"args", "metadata"}
    assert "internal_request_id" in fields(RequestMetadata)


# -- router.api, deploy.app --------------------------------------------------------------------


def test_the_openai_ingress_delivers_the_way_we_call_it():
    from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

    # `router.api.endpoints` does what this does, with the handle of the worker's pool.
    theirs = inspect.getsource(OpenAiIngress._get_response)
    assert ".remote(\n            body, raw_request_info\n        )" in theirs
    assert "_sanitize_chat_completion_request(body)" in theirs
    assert "RawRequestInfo.from_starlette_request(raw_request)" in theirs
    assert parameters(_sanitize_chat_completion_request) == ["request"]
    assert {"llm_deployments", "model_cards"} <= set(parameters(OpenAiIngress.__init__))
    assert "self._model_cards" in source_of(OpenAiIngress)
    assert {"endpoint_map", "app"} <= set(parameters(make_fastapi_ingress))
    assert "headers" in parameters(RawRequestInfo)


def test_the_deployment_builder_takes_our_class_and_arguments():
    from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
    from ray.serve.llm import build_llm_deployment

    assert {"bind_kwargs", "deployment_cls", "override_serve_options"} <= set(
        parameters(build_llm_deployment)
    )
    assert parameters(to_model_metadata)[:2] == ["model_id", "model_config"]


def test_serve_scales_a_deployment_by_a_policy_of_ours():
    from ray.serve._private import autoscaling_state
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

    assert {"policy_function", "policy_kwargs"} <= set(AutoscalingPolicy.model_fields)
    assert {
        "min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s",
        "look_back_period_s", "policy",
    } <= set(AutoscalingConfig.model_fields)  # fmt: skip
    assert {"aggregated_metrics", "running_replicas", "target_num_replicas"} <= set(
        parameters(AutoscalingContext.__init__)
    )
    # A class is made once, with its arguments; bounds and delays are applied to what it answers.
    assert "raw(**policy.policy_kwargs)" in inspect.getsource(
        autoscaling_state._resolve_policy_callable
    )
    assert "_apply_autoscaling_config(" in inspect.getsource(autoscaling_state)


def test_a_replica_hands_its_figures_to_the_autoscaler_by_this_name():
    from ray.serve._private import replica

    assert '"record_autoscaling_stats"' in inspect.getsource(replica)


def test_a_running_serve_can_be_asked_where_it_listens():
    from ray.serve._private.client import ServeControllerClient
    from ray.serve.context import _get_global_client

    assert parameters(_get_global_client) == ["raise_if_no_controller_running"]
    assert isinstance(ServeControllerClient.http_config, property)


# -- workers.vllm.transfer ---------------------------------------------------------------------


def test_vllms_connectors_give_and_take_the_way_ours_does():
    import dataclasses

    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.outputs import RequestOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    # Ours adds fields behind theirs.
    assert dataclasses.is_dataclass(OffloadingConnectorMetadata)
    assert fields(OffloadingConnectorMetadata) == {"load_jobs", "store_jobs", "jobs_to_flush"}
    for name in (
        "bind_connector_metadata", "get_finished", "get_block_ids_with_load_errors",
        "build_connector_meta",
        "update_state_after_alloc", "get_num_new_matched_tokens", "request_finished", "shutdown",
    ):  # fmt: skip
        assert hasattr(KVConnectorBase_V1, name), name
    assert parameters(OffloadingConnector.request_finished_all_groups) == [
        "self", "request", "block_ids",
    ]  # fmt: skip
    assert "self.kv_transfer_params" in inspect.getsource(Request.__init__)
    assert "kv_transfer_params" in parameters(RequestOutput.__init__)
    # What is given is copied at binding, since loads may start behind the forward pass.
    steps = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert steps.index("bind_connector_metadata(") < steps.index("yield output")
    # One more step follows a request's end: that is when its blocks are copied.
    assert "self.finished_req_ids" in inspect.getsource(Scheduler.has_finished_requests)
    assert "recompute" in str(KVTransferConfig.__dataclass_fields__["kv_load_failure_policy"].type)


def test_openai_bodies_and_answers_carry_the_place_of_a_transfer():
    from ray.serve.llm.openai_api_models import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        CompletionRequest,
        CompletionResponse,
    )

    for model in (
        ChatCompletionRequest, ChatCompletionResponse, CompletionRequest, CompletionResponse,
    ):  # fmt: skip
        assert "kv_transfer_params" in model.model_fields


def test_serve_places_workers_by_label():
    import ray.serve

    assert "placement_group_bundle_label_selector" in parameters(ray.serve.deployment)
