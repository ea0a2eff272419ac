"""What only CPUs and paced nodes run: a copy engine over a paced link, a disk tier, a worker that
makes steps last, an engine that computes nothing. `kappa_workers.vllm` imports none of it."""
