"""Other load-test clients beside ours, on one and the same workload, for `kappa bench clients`."""
