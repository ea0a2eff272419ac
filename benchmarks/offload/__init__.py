"""Measures what load plans are worth, on this machine, with the engine as it serves.

`python -m benchmarks.offload --setting NAME` needs torch, numpy, safetensors and transformers, and
nothing else. Every system is measured beside its baseline, in turns, in one process
(`benchmarks.offload.rounds`), and what the planners predicted stands beside what was measured.
"""
