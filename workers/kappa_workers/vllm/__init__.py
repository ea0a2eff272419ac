"""vLLM as a worker's engine: its scheduler, its worker processes, its host tier."""
