"""The scheduler inside every worker: fill the GPU within tokens, VRAM and link, without starvation.

The core files are pure (events and ``now`` in, instructions out); the vLLM adapter translates.
"""
