"""The HTTP face of the router: from a client's socket to a worker, and back."""
