"""What measures the product and what it is compared with. Nothing of the product imports it.

`kappa bench`, `kappa faults` and the baselines, by their names, come in through entry points
(pyproject.toml).
"""
