"""Recorded and generated workloads as plain data: pure readers, no clock and no network.

The simulator and the load test read the same files through the same functions.
"""
