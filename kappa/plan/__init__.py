"""Load plans: how a cached prefix is brought back, planned. Pure: no torch, no engine."""
