"""The real peers, measured beside us: environments of their own, and scripts that run in them."""
