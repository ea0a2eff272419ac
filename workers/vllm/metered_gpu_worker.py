"""vLLM's GPU worker with a report per step.

Apart from `workers.vllm.metered_worker`, because vLLM's is of no use to a machine without a GPU. A
step's seconds are those until its tokens are sampled; with vLLM's asynchronous scheduling that is
when they were asked for, not when the device had computed them. Chosen by
`worker_cls="workers.vllm.metered_gpu_worker.MeteredGPUWorker"`.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from workers.vllm.metered_worker import Metered


class MeteredGPUWorker(Metered, Worker):
    """vLLM's GPU worker, metered."""
