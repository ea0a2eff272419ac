"""CLO: decoding that attends to a chosen part of a context kept in host memory. Approximate."""
