"""The running system: what serving costs, how good predictions are, other clients, long runs."""
