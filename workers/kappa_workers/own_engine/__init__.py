"""Engines of our own as Ray Serve LLM engines: one of torch, one emulated, with one face."""
