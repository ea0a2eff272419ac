"""The worker side: one Serve replica with one engine, its host tier, its measurements.

Nothing here imports the router. What the router needs to know of a worker, the worker reports.
"""
