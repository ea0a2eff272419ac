"""vLLM's host tier: connector, link, loads and stores, recomputed tails, handover."""
