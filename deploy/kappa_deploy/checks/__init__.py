"""What is wrong with a start, a cluster that runs, or manifests: facts in, findings out. Pure."""
