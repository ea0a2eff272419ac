"""Measures what load plans are worth, on this machine, with the engine as it serves."""
