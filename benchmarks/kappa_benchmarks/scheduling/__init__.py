"""What an engine runs next: rules against each other, simulated and on real vLLM."""
