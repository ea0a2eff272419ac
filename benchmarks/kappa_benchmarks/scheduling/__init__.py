"""Benches of scheduling rules: against each other, simulated and on real vLLM."""
