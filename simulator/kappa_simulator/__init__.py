"""A cluster of unlike nodes in simulated time: drives the live router and scheduler cores.

Pure: no clock, log or network; all randomness comes from seeds. Its physics is its own (iterations,
links, caches), not the router's formula, so that a policy is judged by what it did not assume.
"""
