"""Scheduling rules of other engines."""
