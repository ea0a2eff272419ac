"""The scheduler inside every worker: fill the GPU within tokens, VRAM and link, starve nobody.

The core files are pure (events and ``now`` in, instructions out); the vLLM adapter translates.
"""
