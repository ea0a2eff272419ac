"""The differences between the versions of vLLM that our plug-ins run in: a module for each. Private
names that all versions share stand where they are used; tests/workers/vllm/test_versions.py reads
the sources of each version for both. `stock` engines do not come here."""
