"""Who holds which prefix: the prefix index, its store and hashes, the events that feed it."""
