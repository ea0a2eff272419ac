"""Wiring and command line: the only package that may import every other."""
