"""What differs between the versions of vLLM that our plug-ins run in: one module for each.

Names private to vLLM that all known versions share stand where they are used; those that moved, or
changed their meaning, stand here, and tests/workers/vllm/test_versions.py reads the sources of each
version for both. An engine without our plug-ins (`scheduler.name: stock`, `host_tier: stock`) does
not come here.
"""
