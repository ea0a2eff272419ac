"""vLLM's connector of workers that hand KV over: our host tier's, and transfers between workers. A
prefill worker's request carries `kv_transfer_params: {"do_remote_decode": true}` and is answered
with the parameters for the decode worker, in vLLM's own words; there the blocks are received while
the request waits. What does not come is computed again."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from workers.vllm.connector import HostTierConnector, HostTierMetadata
from workers.vllm.link import LoadSource
from workers.vllm.options import TRANSFER_KEY, read_options
from workers.vllm.transfer_files import TransferError, TransferFiles, TransferOptions

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

log = structlog.get_logger(__name__)

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Send:
    """Blocks of a request that is prefilled, to be written under this name."""

    name: str
    block_ids: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Blocks of a request that waits for them, from the `start`-th of the transfer on."""

    request_id: str
    name: str
    block_ids: list[int]
    start: int
    tokens: int


@dataclass
class TransferMetadata(HostTierMetadata):
    """What the scheduler sends the workers of one step."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)


class TransferConnector(HostTierConnector):
    """The host tier's connector that also sends and receives whole prompts."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._kappa_sends: list[Send] = []
        self._kappa_receives: list[Receive] = []
        # Requests that will receive, and those that did once: not again after a preemption.
        self._kappa_receiving: dict[str, tuple[str, int]] = {}
        self._kappa_received: set[str] = set()
        self._kappa_mover: Mover | None = None
        if role == KVConnectorRole.WORKER:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            options = read_options(extra, TRANSFER_KEY, TransferOptions)
            rank = int(vllm_config.parallel_config.rank)
            self._kappa_mover = Mover(TransferFiles(options, rank))

    # -- the scheduler's side -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As the host tier's, or what another worker hands over if that is more."""
        hit, loads_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        # What was answered before, when there was no room for the request, holds no longer.
        self._kappa_receiving.pop(request.request_id, None)
        params = params_of(request)
        if not params.get("do_remote_prefill") or request.request_id in self._kappa_received:
            return hit, loads_async
        size, claimed = self._kappa_block_tokens, params.get("remote_tokens")
        # An engine computes at least the last token.
        usable = (request.num_prompt_tokens - 1) // size * size
        handed = (min(claimed, usable) if isinstance(claimed, int) else 0) - num_computed_tokens
        if handed <= (hit or 0):
            return hit, loads_async
        name = str(params.get("transfer_name", ""))
        self._kappa_receiving[request.request_id] = name, num_computed_tokens
        return handed, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """As the host tier's, which loads nothing for a request whose blocks are handed over."""
        request_id, tokens = request.request_id, num_external_tokens
        name, computed = self._kappa_receiving.pop(request_id, ("", -1))
        if computed >= 0 and tokens:
            size = self._kappa_block_tokens
            start = computed // size
            ids = list(blocks.get_block_ids()[0][start : start + tokens // size])
            self._kappa_received.add(request_id)
            self._kappa_receives.append(Receive(request_id, name, ids, start, tokens))
            # Reported as loaded before the host tier can report that it loads nothing.
            self._kappa_admissions.admitted(request, tokens)
            tokens = 0
        super().update_state_after_alloc(request, blocks, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The host tier's, with what is sent and received from this step on."""
        meta = super().build_connector_meta(scheduler_output)
        sends, self._kappa_sends = self._kappa_sends, []
        receives, self._kappa_receives = self._kappa_receives, []
        return TransferMetadata(**vars(meta), sends=sends, receives=receives)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As the host tier's; a prefill that is to be handed over is answered with its transfer."""
        later, _ = super().request_finished(request, block_ids)
        self._kappa_receiving.pop(request.request_id, None)
        self._kappa_received.discard(request.request_id)
        count = request.num_prompt_tokens // self._kappa_block_tokens
        computed = request.num_computed_tokens >= request.num_prompt_tokens
        if not (params_of(request).get("do_remote_decode") and count and computed):
            return later, None
        # The blocks are free now, but nothing writes to them before the next step's forward pass,
        # and they are copied before that.
        tokens = count * self._kappa_block_tokens
        send = Send(uuid.uuid4().hex, list(block_ids[:count]), tokens)
        self._kappa_sends.append(send)
        return later, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_name": send.name,
            "remote_tokens": tokens,
        }

    # -- the worker's side --------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """As the host tier's; what is sent is copied now, before the step's forward pass writes to
        those blocks (`start_load_kv` may come behind it), what is received may come from now on."""
        super().bind_connector_metadata(connector_metadata)
        mover = self._kappa_mover
        if isinstance(connector_metadata, TransferMetadata) and mover is not None:
            tier = self._kappa_tier()
            assert tier is not None, "a transfer needs the host tier of our own"
            for send in connector_metadata.sends:
                mover.send(send, tier.device)
            for receive in connector_metadata.receives:
                mover.receive(receive, tier.device)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As the host tier's, with the requests whose blocks were received, or will not come."""
        sent, received = super().get_finished(finished_req_ids)
        ended = self._kappa_mover.take_ended() if self._kappa_mover is not None else set()
        return sent, {*(received or ()), *ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As the host tier's, with the blocks that did not come: vLLM computes them."""
        lost = self._kappa_mover.take_lost() if self._kappa_mover is not None else set()
        return super().get_block_ids_with_load_errors() | lost

    def shutdown(self) -> None:
        if self._kappa_mover is not None:
            self._kappa_mover.shutdown()
        super().shutdown()


class Mover(LoadSource):
    """Sends and receives in threads of its own, one for each: the network both ways."""

    def __init__(self, files: TransferFiles) -> None:
        super().__init__()
        self._files = files
        self._changed = threading.Condition()
        self._receiving = 0
        self._came_s = float("-inf")
        self._ended: set[str] = set()
        self._lost: set[int] = set()
        self._threads = [ThreadPoolExecutor(1, f"kappa-{way}") for way in ("send", "receive")]

    def send(self, send: Send, device: Tensors) -> None:
        """Copy the blocks now, write them later."""
        ids = torch.tensor(send.block_ids)
        copies = [tensor.index_select(0, ids.to(tensor.device)).cpu() for tensor in device]
        self._threads[0].submit(self._write, send, copies)

    def receive(self, receive: Receive, device: Tensors) -> None:
        """Fetch the blocks; `take_ended` will name the request."""
        with self._changed:
            self._receiving += 1
        # What the device was given to do before now may still write to these blocks.
        before = torch.cuda.Event() if device[0].is_cuda else None
        if before is not None:
            before.record()
        self._threads[1].submit(self._fetch, receive, device, before, time.monotonic())

    def take_ended(self) -> set[str]:
        """Requests whose transfer ended since the last call, well or not."""
        with self._changed:
            ended, self._ended = self._ended, set()
        return ended

    def take_lost(self) -> set[int]:
        """Device blocks that were to be filled since the last call, and were not."""
        with self._changed:
            lost, self._lost = self._lost, set()
        return lost

    def wait_for_load(self, timeout_s: float) -> bool:
        with self._changed:
            in_flight = self._receiving > 0
            if in_flight and not self._ended:
                self._changed.wait(timeout_s)
        return in_flight

    def shutdown(self) -> None:
        self.leave()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def _write(self, send: Send, copies: Tensors) -> None:
        try:
            self._files.send(send.name, copies, send.tokens)
        except Exception:
            log.exception("transfer_failed", direction="send")

    def _fetch(self, receive: Receive, device: Tensors, before: Any, ordered_s: float) -> None:
        lost: set[int] = set()
        try:
            # Those behind one that never came have waited with it: not as long again for each.
            since_s = max(ordered_s, self._came_s)
            blocks = self._files.receive(receive.name, receive.tokens, since_s)
            self._came_s = time.monotonic()
            if before is not None:
                before.synchronize()
            fill(device, blocks, receive.block_ids, receive.start)
            if before is not None:
                # In this thread's stream: the engine's knows nothing of it.
                torch.cuda.current_stream(device[0].device).synchronize()
        except TransferError as error:
            lost = set(receive.block_ids)
            log.warning("transfer_lost", request_id=receive.request_id, reason=str(error))
        except Exception:
            # Whatever it was: the request must not wait for ever.
            lost = set(receive.block_ids)
            log.exception("transfer_failed", request_id=receive.request_id)
        self.add_load_s(receive.request_id, time.monotonic() - ordered_s)
        with self._changed:
            self._receiving -= 1
            self._ended.add(receive.request_id)
            self._lost |= lost
            self._changed.notify_all()


def fill(device: Tensors, received: Tensors, block_ids: list[int], start: int) -> None:
    """Write the transfer's blocks from the `start`-th on to these device blocks.

    Raises:
        TransferError: they are not shaped like this worker's.
    """
    ids = torch.tensor(block_ids)
    parts = [tensor[start : start + len(block_ids)] for tensor in received]
    if [(part.shape, part.dtype) for part in parts] != [
        ((len(block_ids), into.shape[1]), into.dtype) for into in device
    ]:
        raise TransferError("its blocks are not shaped like this worker's")
    for part, into in zip(parts, device, strict=True):
        into.index_copy_(0, ids.to(into.device), part.to(into.device))


def params_of(request: Request) -> dict[str, Any]:
    params = getattr(request, "kv_transfer_params", None)
    return params if isinstance(params, dict) else {}
