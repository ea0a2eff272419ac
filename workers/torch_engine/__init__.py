"""Our own engine as a Ray Serve LLM engine: `engine: torch` in the settings."""
