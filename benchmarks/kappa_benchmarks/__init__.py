"""Benches of the product, and the systems it is compared with. The product does not import them.

`kappa bench`, `kappa faults` and the baselines, by their names, come in through entry points
(pyproject.toml).
"""
