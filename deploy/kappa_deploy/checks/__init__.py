"""Checks of a start, of a running cluster and of manifests: facts in, findings out. Pure."""
