"""Own torch engine: executes every load plan. No Ray, no vLLM; the same code on CPU and CUDA."""
