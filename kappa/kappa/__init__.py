"""The cost model: seconds of a cached token and of a new token on a given node."""
