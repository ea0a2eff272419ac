"""The law: what a cached token and a new token cost, in seconds, on a given node."""
