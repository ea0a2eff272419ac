"""Paper 001's microbenchmark: what loading a cached prefix costs, measured and fitted."""
