"""LMCache as host tier, bounded in all that it does."""
