"""The load test: replays a workload over HTTP against any OpenAI-compatible endpoint and reports.

It knows the endpoint by its URL only and imports no part of the router or the workers.
"""
