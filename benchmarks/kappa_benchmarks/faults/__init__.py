"""Things that go wrong, done to a running cluster on purpose, and what its clients saw of them."""
