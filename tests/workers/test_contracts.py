"""Every name of vLLM and Ray that is private, or not promised, and that our adapters rely on.

Tables by adapter: when an upgrade breaks a row, its place says which adapter to look at.
"""

import dataclasses
import importlib
import inspect

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTOR}.offloading"
_OFFLOADER = f"{_CONNECTOR}.offloading_connector:OffloadingConnector"
_SCHEDULER = f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_STATE = f"{_OFFLOADING}.scheduler:RequestOffloadState"
_MANAGER = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"
_SPEC = "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec"
_RENDERER = "vllm.renderers.base:BaseRenderer"
_DETOKENIZER = "vllm.v1.engine.detokenizer"
_ENGINE = "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine"
_CORE = "vllm.v1.engine.core_client:EngineCoreClient"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_REQUEST_ROUTER = "ray.serve.request_router:RequestRouter"
_LLM_SERVER = "ray.serve.llm.deployment:LLMServer"
_BODIES = "ray.serve.llm.openai_api_models"
_AUTOSCALING = "ray.serve.config"


def named(path):
    """What `module:attribute.attribute` names."""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for name in attributes.split(".") if attributes else ():
        found = getattr(found, name)
    return found


def parameters(function):
    return list(inspect.signature(function).parameters)


def source_of(found):
    """Source of a module, a function, or a class and what it inherits."""
    if not inspect.isclass(found):
        return inspect.getsource(found)
    own = [base for base in found.__mro__ if base.__module__.split(".")[0] in ("ray", "vllm")]
    return "".join(inspect.getsource(base) for base in own)


# The first parameters of methods that we override or call, `self` left out.
SIGNATURES = {
    # workers.replica: the application behind a worker's own HTTP port
    "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine.build_asgi_app": "",
    # kappa_deploy.app.build
    "ray.experimental.internal_kv:_internal_kv_put": "key value overwrite",
    "ray.experimental.internal_kv:_internal_kv_get": "key",
    # workers.own_engine
    f"{_ENGINE}.__init__": "llm_config",
    f"{_ENGINE}._start_async_llm_engine": ("vllm_engine_args vllm_engine_config placement_group"),
    f"{_ENGINE}.check_health": "",
    f"{_ENGINE}.shutdown": "",
    f"{_CORE}.add_request_async": "request",
    f"{_CORE}.abort_requests_async": "request_ids",
    f"{_CORE}.get_output_async": "",
    f"{_CORE}.get_supported_tasks_async": "",
    f"{_CORE}.collective_rpc_async": "method timeout args kwargs",
    f"{_CORE}.shutdown": "timeout",
    f"{_ASYNC}.__init__": "vllm_config executor_class log_stats",
    f"{_ASYNC}.generate": "prompt sampling_params request_id",
    "vllm.v1.metrics.stats:PrefillStats.set": (
        "num_prompt_tokens num_local_cached_tokens num_external_cached_tokens"
    ),
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.create_responses": (
        "request raw_request"
    ),
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params": (
        "default_max_tokens default_sampling_params"
    ),
    # kappa_workers.vllm.connector
    f"{_OFFLOADER}.__init__": "vllm_config role kv_cache_config",
    f"{_OFFLOADER}.get_num_new_matched_tokens": "request num_computed_tokens",
    f"{_OFFLOADER}.update_state_after_alloc": "request blocks num_external_tokens",
    f"{_OFFLOADER}.request_finished": "request block_ids",
    f"{_OFFLOADER}.request_finished_all_groups": "request block_ids",
    f"{_STATE}.update_num_hit_chunks": "num_cached_tokens",
    f"{_STATE}.update_offload_keys": "",
    f"{_SCHEDULER}._touch": "req_status",
    f"{_CONNECTOR}.base:KVConnectorWorkerMetadata.aggregate": "other",
    # kappa_workers.vllm.host_tier, kappa_workers.vllm.gpu_host_tier
    f"{_MANAGER}.__init__": "num_blocks cache_policy cache_policy_module_path enable_events",
    f"{_SPEC}.get_worker": "kv_caches",
    "vllm.v1.kv_offload.base:BlockIDsLoadStoreSpec.__init__": "block_ids",
    "vllm.v1.kv_offload.base:GPULoadStoreSpec.__init__": "block_ids group_sizes block_indices",
    # kappa_workers.vllm.metered_worker
    "vllm.v1.worker.cpu_worker:CPUWorker.execute_model": "scheduler_output",
    "vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens": "grammar_output",
    # workers.announcing
    f"{_LLM_SERVER}.__init__": "llm_config",
    # workers.replica, workers.no_download
    f"{_LLM_SERVER}._start_engine": "",
    f"{_LLM_SERVER}.record_routing_stats": "",
    f"{_LLM_SERVER}.collective_rpc": "method timeout args",
    "vllm.v1.engine.output_processor:OutputProcessor.get_num_unfinished_requests": "",
    # kappa_workers.vllm.output_collector
    "vllm.v1.engine.output_processor:RequestOutputCollector.__init__": "output_kind request_id",
    "vllm.v1.engine.output_processor:RequestOutputCollector.get": "",
    "vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait": "",
    # kappa_workers.vllm.incremental_prompts
    f"{_RENDERER}._tokenize_prompt": "prompt params",
    "vllm.renderers.params:TokenizeParams.get_encode_kwargs": "",
    f"{_DETOKENIZER}:FastIncrementalDetokenizer.__init__": "tokenizer request",
    "ray.llm._internal.common.callbacks.base:CallbackBase.on_before_node_init": "",
    # router.ray_router
    f"{_REQUEST_ROUTER}.update_replicas": "replicas",
    f"{_REQUEST_ROUTER}.on_replica_actor_died": "replica_id",
    f"{_REQUEST_ROUTER}.choose_replicas": "candidate_replicas pending_request",
    f"{_REQUEST_ROUTER}.on_request_completed": "replica_id internal_request_id",
    f"{_REQUEST_ROUTER}.on_request_routed": "pending_request replica_id result",
    # deploy.app
    "ray.serve.context:_get_global_client": "raise_if_no_controller_running",
    "ray.serve._private.client:ServeControllerClient.get_serve_details": "",
    "ray._raylet:AuthenticationTokenLoader.reset_cache": "",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_method_takes_what_we_give_it(path):
    expected = SIGNATURES[path].split()
    found = [name for name in parameters(named(path)) if name != "self"]
    assert found[: len(expected)] == expected
    assert expected or not found


# Parameters, or fields of dataclasses, structs, models and annotations, that must be among them.
NAMES = {
    # kappa_workers.vllm.connector
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta invalid_block_ids",
    f"{_OFFLOADING}.scheduler:TransferJobStatus": "keys",
    f"{_OFFLOADING}.common:OffloadingConnectorMetadata": "load_jobs",
    f"{_OFFLOADING}.common:TransferJob": "req_id",
    _STATE: "partial_tail_boundary",
    "vllm.config:KVTransferConfig": "kv_load_failure_policy",
    "vllm.outputs:RequestOutput.__init__": "kv_transfer_params",
    # workers.own_engine
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id prompt_token_ids sampling_params cache_salt priority"
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids finish_reason stop_reason prefill_stats"
    ),
    "vllm.v1.engine:EngineCoreOutputs": "outputs",
    # kappa_workers.vllm.host_tier
    "vllm.v1.kv_offload.base:CanonicalKVCacheTensor": "tensor page_size_bytes",
    "vllm.v1.kv_offload.base:CanonicalKVCaches": "tensors",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig": "rank world_size",
    # kappa_workers.vllm.metered_worker
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
        "total_num_scheduled_tokens finished_req_ids"
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id prompt_token_ids sampling_params num_computed_tokens"
    ),
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids num_computed_tokens",
    "vllm.config:VllmConfig": "additional_config model_config parallel_config device_config",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "vllm_xargs",
    "vllm.distributed.kv_events:BlockStored": "extra_keys",
    # kappa_workers.vllm.incremental_prompts
    "vllm.renderers.params:TokenizeParams": "return_token_offsets",
    # workers.replica
    "ray.serve.llm:LLMConfig": (
        "callback_config placement_group_config accelerator_config log_engine_metrics runtime_env "
        "deployment_config server_cls"
    ),
    "ray.serve.context:ReplicaContext": "replica_id rank",
    # workers.announcing
    "vllm.config:ParallelConfig": "world_size worker_extension_cls",
    "vllm.config:DeviceConfig": "device_type",
    "vllm.config:ModelConfig": "hf_config model",
    "vllm.engine.arg_utils:EngineArgs": "worker_extension_cls",
    # router.ray_router
    "ray.serve._private.common:ReplicaID": "unique_id",
    "ray.serve._private.common:RequestMetadata": "call_method internal_request_id",
    "ray.serve.request_router:PendingRequest": "args metadata",
    f"{_REQUEST_ROUTER}.initialize_state": "kwargs",
    # router.api, deploy.app
    "ray.serve.llm:build_llm_deployment": "bind_kwargs deployment_cls override_serve_options",
    f"{_AUTOSCALING}:AutoscalingPolicy": "policy_function policy_kwargs",
    f"{_AUTOSCALING}:AutoscalingConfig": (
        "min_replicas max_replicas upscale_delay_s downscale_delay_s look_back_period_s policy"
    ),
    f"{_AUTOSCALING}:AutoscalingContext.__init__": (
        "aggregated_metrics running_replicas target_num_replicas"
    ),
    f"{_BODIES}:ChatCompletionRequest": "kv_transfer_params",
    f"{_BODIES}:ChatCompletionResponse": "kv_transfer_params",
    f"{_BODIES}:CompletionRequest": "kv_transfer_params",
    f"{_BODIES}:CompletionResponse": "kv_transfer_params",
    "ray.serve:deployment": "placement_group_bundle_label_selector",
    "ray.serve.schema:ServeInstanceDetails": "applications",
}


@pytest.mark.parametrize("path", NAMES)
def test_a_record_has_the_fields_that_we_use(path):
    found = named(path)
    known = set(getattr(found, "model_fields", ())) or set(getattr(found, "__struct_fields__", ()))
    known |= set(getattr(found, "__annotations__", ()))
    if not inspect.isclass(found) or not known:
        known |= set(parameters(found))
    assert set(NAMES[path].split()) <= known


# Text that must stand in the named source: attributes that are set, calls in an order.
SOURCES = {
    "vllm.v1.request:Request.__init__": (
        "self.num_prompt_tokens", "self.sampling_params", "self.kv_transfer_params",
    ),
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": (
        "extra_args",
    ),
    # What a load took is reported under the id that the scheduler's steps name a request by.
    _SCHEDULER: (
        "self.manager", "self._jobs", "self._events_tracker", "self._req_status",
        "TransferJob(\n            req_id=request.request_id",
    ),
    f"{_OFFLOADING}.events:OffloadingEventsTracker": ("self._pending_event_metadata",),
    _MANAGER: ("self._policy", "self._get_load_store_spec"),
    f"{_SPEC}.get_manager": ("_manager", "eviction_policy", "cache_policy_module_path"),
    _SPEC: ("self.extra_config", "self.num_blocks", "self.blocks_per_chunk",
            "self.tokens_per_block", "self.config = config"),
    # The size checked against memory and /dev/shm is all that vLLM takes: of all ranks together.
    f"{_SPEC}.__init__": (
        "num_copies = 1 if self.replicated_layout else world_size",
        "self.num_blocks = int(cpu_bytes_to_use) // aligned_kv_bytes_per_chunk",
    ),
    f"{_SPEC}.create_worker": (
        "SharedOffloadRegion(", "rank = torch.accelerator.current_device_index() % world_size",
    ),
    "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion.__init__": (
        'f"/dev/shm/vllm_offload_{engine_id}.mmap"', "check_shm_free_space(self.total_size_bytes)",
        "self._row_stride = kv_bytes_per_block", "self.fd: int | None = os.open(",
    ),
    # What peers read of vLLM's tier.
    "vllm.v1.kv_offload.cpu.gpu_worker:CPUOffloadingWorker.__init__": (
        "self._mmap_region = mmap_region",
    ),
    # The seconds of a transfer lie between two events of its stream, and waiting is not among them.
    "vllm.v1.kv_offload.cpu.gpu_worker:SingleDirectionOffloadingHandler.transfer_async": (
        "stream.wait_event(last_event)", "start_event.record(stream)", "end_event.record(stream)",
    ),
    "vllm.v1.kv_offload.cpu.gpu_worker:SingleDirectionOffloadingHandler.get_finished": (
        "transfer_size=transfer.num_bytes", "transfer_time=transfer_time",
        "transfer.start_event.elapsed_time(transfer.end_event) * 1e-3",
    ),
    _LLM_SERVER: ("self._llm_config", "self.engine"),
    "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine": (
        "self._engine_client = self._start_async_llm_engine",
    ),
    f"{_ASYNC}.__init__": (
        "self.vllm_config = vllm_config",
        "self.renderer = ",
        "self.engine_core = EngineCoreClient.make_async_mp_client(",
    ),
    # An engine of ours takes the place of the core that is made there, and is asked so.
    _ASYNC: (
        "self.engine_core.resources.engine_dead", "self.output_processor = OutputProcessor(",
    ),
    f"{_ENGINE}.start": ("self._app_state = state",),
    # Requests are checked where an answer begins, of streamed responses before that.
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_completion": (
        "generator = self.engine_client.generate(\n                    engine_input,",
    ),
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": (
        "generator = self.engine_client.generate(\n                    engine_input,",
    ),
    # Each request's outputs leave by the collector that is made for it.
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": (
        "queue = RequestOutputCollector(params.output_kind, request.request_id)",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        "out = q.get_nowait() or await q.get()", "finished = out.finished",
    ),
    # Every text is tokenized by an attribute of the renderer's instance; what a request's answer is
    # decoded by is made of the name that the module has.
    f"{_RENDERER}.__init__": ("self._tokenize_prompt_async = make_async(",),
    f"{_RENDERER}._tokenize_singleton_prompt_async": (
        "prompt = await self._tokenize_prompt_async(prompt, params)",
    ),
    f"{_RENDERER}._tokenize_prompt": ("tokenizer(prompt[\"prompt\"], **kwargs)",),
    "vllm.renderers.params:TokenizeParams.get_encode_kwargs": (
        "truncation=False,\n                add_special_tokens=self.add_special_tokens",
        "truncation=max_length is not None,\n            max_length=max_length,\n"
        "            add_special_tokens=self.add_special_tokens",
    ),
    f"{_DETOKENIZER}:IncrementalDetokenizer.from_new_request": (
        "return FastIncrementalDetokenizer(tokenizer, request)",
    ),
    f"{_DETOKENIZER}:FastIncrementalDetokenizer.__init__": ("ids=request.prompt_token_ids",),
    # The engine makes its hasher by the name in its module, after its scheduler; hashing goes on
    # behind the blocks that have a hash.
    "vllm.v1.engine.core:EngineCore.__init__": (
        "self.scheduler: SchedulerInterface = Scheduler(",
        "self.request_block_hasher = get_request_block_hasher(\n                hash_block_size, ",
    ),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": (
        "start_token_idx = len(request.block_hashes) * hash_block_size",
        "request.block_hashes[-1] if request.block_hashes else None",
    ),
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": (
        "[request.cache_salt] if (start_token_idx == 0 and request.cache_salt) else []",
        "lora_extra_keys + mm_extra_keys + cache_salt_keys + prompt_embeds_keys",
    ),
    "vllm.v1.request:Request.update_block_hashes": (
        "self.block_hashes.extend(self._block_hasher(self))",
    ),
    # A stock worker's class gets `kappa_workers.vllm.measured_worker` as one more base, in front of
    # nothing: what it defines must be new there.
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker": (
        "worker_class.__bases__ = worker_class.__bases__ + (", "assert not hasattr(worker_class",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache": (
        "self.kv_cache_config = kv_cache_config",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache": (
        "self.kv_cache_config = kv_cache_config",
    ),
    # Behind direct streaming a replica is only picked: nothing says when the request ends, and its
    # parsed body comes alone, where Ray is given it.
    "ray.serve._private.router:AsyncioRouter.choose_replica": (
        'reserve = request_kwargs.pop("_reserve", True)',
        "if not reserve:\n            yield selection\n            return",
    ),
    "ray.llm._internal.serve.core.ingress.router:LLMRouter._pick_replica": (
        "route_args = (routing_payload,) if routing_payload is not None else ()",
        '{"_reserve": False}',
    ),
    "ray.llm._internal.serve.core.ingress.router:_get_routing_payload_from_body": (
        "SimpleNamespace(**data)",
    ),
    # Elsewhere a replica that took a request is named, and its end is reported.
    "ray.serve._private.router:AsyncioRouter._route_and_send_request_once": (
        "self._register_completion_callback(result, replica, pr)",
        "on_request_routed(\n                    pr, replica.replica_id, result",
    ),
    f"{_REQUEST_ROUTER}.__init__": ("self._deployment_id",),
    # A class is made once, with its arguments; bounds and delays are applied to what it answers.
    "ray.serve._private.autoscaling_state:_resolve_policy_callable": (
        "raw(**policy.policy_kwargs)",
    ),
    "ray.serve._private.autoscaling_state": ("_apply_autoscaling_config(",),
    "ray.serve._private.replica": ('"record_autoscaling_stats"',),
    # kappa_deploy.app.ray_cluster: where Ray takes loopback for this machine's address, so listen
    # what serves its metrics, which demands no token.
    "ray._private.services:get_node_ip_address": (
        "if not ray_constants.ENABLE_RAY_CLUSTER:", "return get_localhost_ip()",
    ),
    "ray.dashboard.modules.reporter.reporter_agent": (
        'address=get_localhost_ip() if is_localhost(self._ip) else ""',
    ),
    "ray.dashboard.head": ('{"addr": get_localhost_ip()} if is_localhost(self.ip) else {}',),
    "ray.autoscaler.v2.monitor": (
        '{"addr": get_localhost_ip()} if is_localhost(head_node_ip) else {}',
    ),
    # One more step follows a request's end: that is when its blocks are copied, and reports leave.
    "vllm.v1.core.sched.scheduler:Scheduler.has_finished_requests": ("self.finished_req_ids",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self.kv_event_publisher.publish(batch)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", SOURCES)
def test_the_source_has_what_we_rely_on(path):
    source = source_of(named(path))
    assert [text for text in SOURCES[path] if text not in source] == []


PRESENT = [
    "kappa_workers.paced.metered_worker:MeteredCPUWorker",
    "kappa_workers.vllm.connector:HostTierConnector",
    "kappa_workers.paced.connector:CpuHostTierConnector",
    "kappa_workers.paced.host_tier:HostTierSpec", "kappa_workers.vllm.gpu_host_tier:NativeTierSpec",
    "kappa_workers.no_download:NoDownload",
    "kappa_router.ray_router:KappaRouter", "kappa_workers.vllm.scheduler:FairScheduler",
    "kappa_workers.vllm.measured_worker:MeasuredWorker",
    "kappa_workers.announcing:AnnouncingServer",
    "ray.serve._private.constants:RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY",
    *(f"{_CONNECTOR}:KVConnectorBase_V1.{name}" for name in (
        "bind_connector_metadata", "get_finished", "get_block_ids_with_load_errors",
        "build_connector_meta", "update_state_after_alloc", "get_num_new_matched_tokens",
        "request_finished", "shutdown",
    )),
    "ray.serve.llm:LLMConfig.update_engine_kwargs",
    "ray.serve.request_router:RunningReplica.routing_stats",
    "ray.serve.request_router:RunningReplica.replica_id",
]  # fmt: skip


@pytest.mark.parametrize("path", PRESENT)
def test_what_we_name_as_text_or_read_exists(path):
    assert named(path) is not None


# -- what no table says ---------------------------------------------------------------------------


def test_spin_condition_ends_with_its_busy_loop_default():
    spin = named("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.__init__")
    assert parameters(spin)[-1] == "busy_loop_s" and spin.__defaults__ is not None


def test_ray_reads_the_niceness_of_workers_where_it_is_set():
    assert named("ray._private.ray_constants:RAY_WORKER_NICENESS") == "RAY_worker_niceness"


def test_connector_roles_differ_and_sampling_takes_extra_args():
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    assert KVConnectorRole.SCHEDULER != KVConnectorRole.WORKER
    assert SamplingParams(extra_args={"a": 1}).extra_args == {"a": 1}


def test_records_of_vllm_have_the_fields_that_ours_extend():
    from vllm.distributed import kv_events
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
    from vllm.v1.kv_offload import base

    assert list(common.OffloadingWorkerMetadata.__annotations__) == [
        "completed_jobs", "transfer_stats",
    ]  # fmt: skip
    # Ours adds fields behind theirs.
    theirs = [field.name for field in dataclasses.fields(common.OffloadingConnectorMetadata)]
    assert set(theirs) == {"load_jobs", "store_jobs", "jobs_to_flush"}
    assert list(base.TransferResult.__annotations__) == [
        "job_id", "success", "transfer_size", "transfer_time",
    ]  # fmt: skip
    assert kv_events.BlockStored.__struct_fields__[:7] == (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    )  # fmt: skip
    assert kv_events.BlockRemoved.__struct_fields__[:2] == ("block_hashes", "medium")
    assert kv_events.KVEventBatch.__struct_fields__[:2] == ("ts", "events")


def test_lmcache_connector_answers_the_calls_of_vllms_connectors():
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA

    from kappa_workers.vllm.lmcache.connector import LmcacheConnector
    from kappa_workers.vllm.lmcache.scheduler import LmcacheScheduler
    from kappa_workers.vllm.lmcache.worker import LmcacheWorker

    assert issubclass(LmcacheConnector, SupportsHMA)
    of_workers = (
        "register_kv_caches", "handle_preemptions", "start_load_kv", "wait_for_save",
        "get_finished", "get_block_ids_with_load_errors", "build_connector_worker_meta", "shutdown",
    )  # fmt: skip
    of_schedulers = (
        "on_new_request", "take_events", "get_num_new_matched_tokens", "update_state_after_alloc",
        "build_connector_meta", "update_connector_output", "request_finished", "reset_cache",
    )  # fmt: skip
    for half, names in ((LmcacheWorker, of_workers), (LmcacheScheduler, of_schedulers)):
        assert not half.__abstractmethods__
        for name in names:
            theirs = parameters(getattr(KVConnectorBase_V1, name))
            assert parameters(getattr(half, name))[: len(theirs)] == theirs, name


def test_a_failed_load_can_be_computed_instead():
    from vllm.config import KVTransferConfig

    assert KVTransferConfig(kv_load_failure_policy="recompute").kv_load_failure_policy


def test_the_host_tier_takes_what_vllms_takes():
    from vllm.v1.kv_offload.base import OffloadingWorker

    from kappa_workers.paced.host_tier import HostTierWorker
    from kappa_workers.vllm.gpu_host_tier import NativeTierWorker
    from kappa_workers.vllm.host_tier_manager import HostTierManager

    for name in ("prepare_store", "complete_store", "reset_cache"):
        theirs, ours = getattr(named(_MANAGER), name), getattr(HostTierManager, name)
        assert parameters(ours) == parameters(theirs)
    for worker in (HostTierWorker, NativeTierWorker):
        assert not worker.__abstractmethods__
        for name in OffloadingWorker.__abstractmethods__:
            theirs, ours = getattr(OffloadingWorker, name), getattr(worker, name)
            # Later versions give more, by name.
            assert parameters(ours)[: len(parameters(theirs))] == parameters(theirs), name
            more = list(inspect.signature(ours).parameters.values())[len(parameters(theirs)) :]
            assert all(each.default is not each.empty for each in more), name


def test_vllm_knows_every_engine_argument_and_variable_of_ours():
    import vllm.envs
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kappa.hardware import node_profile
    from kappa.shapes import model_shape
    from kappa_workers.vllm import arguments

    limits = arguments.EngineLimits(4096, 32, 200, 1 << 20, 1024, 8, "float32")
    pace = arguments.Pace(model_shape("llama-3.1-8b"), node_profile("pcie"))
    ends, scheduler = arguments.Endpoints("ipc://a", "ipc://b"), arguments.SchedulerOptions("fair")
    given = arguments.engine_kwargs(limits, ends, pace, scheduler)
    assert "scheduler_cls" in given
    assert set(given) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    ours = {name for name in arguments.CPU_ENV if name.startswith("VLLM_")}
    assert ours <= set(vllm.envs.environment_variables)


def test_the_llm_server_is_made_and_watched_by_coroutines():
    server = named(_LLM_SERVER)
    assert inspect.iscoroutinefunction(server.__init__)
    assert inspect.iscoroutinefunction(server.check_health)


def test_a_server_class_is_named_by_its_path_in_a_config():
    from ray.serve.llm import LLMConfig

    from kappa_workers.announcing import AnnouncingServer

    given = {"model_loading_config": {"model_id": "m"}, "accelerator_config": {"kind": "cpu"}}
    config = LLMConfig(**given, server_cls="kappa_workers.announcing.AnnouncingServer")
    assert config.server_cls is AnnouncingServer


def test_the_part_that_measures_is_new_to_vllms_workers():
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from kappa_workers.vllm.measured_worker import MeasuredWorker

    ours = [name for name in dir(MeasuredWorker) if not name.startswith("__")]
    assert "kappa_profile" in ours
    assert not [name for name in ours if hasattr(CPUWorker, name) or hasattr(Worker, name)]


def test_a_callback_can_switch_the_download_off():
    from ray.llm._internal.common.callbacks.base import CallbackCtx

    assert CallbackCtx().run_init_node is True


def test_runners_bind_metadata_before_the_forward_pass():
    mixin = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
    steps = inspect.getsource(named(f"{mixin}._get_kv_connector_output"))
    assert steps.index("bind_connector_metadata(") < steps.index("yield output")
    # vLLM's second model runner, which GPUs have.
    runner = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"
    before = inspect.getsource(named(f"{runner}.pre_forward"))
    assert "bind_connector_metadata(" in before and "get_finished" not in before
