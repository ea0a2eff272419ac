"""What the `kappa bench` commands are made of: clusters under test, grids, reports, pictures."""
