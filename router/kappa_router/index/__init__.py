"""The prefix index: who holds which prefix, its store and hashes, the events that feed it."""
