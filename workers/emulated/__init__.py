"""Engines that compute nothing, and say so: for tests of a cluster on a small machine."""
