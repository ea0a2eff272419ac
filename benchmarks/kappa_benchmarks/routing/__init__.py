"""Benches of routing: policies against each other, against hindsight, and other routers."""
