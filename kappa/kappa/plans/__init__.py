"""Load plans: ways to bring a cached prefix back, and their predicted seconds."""
