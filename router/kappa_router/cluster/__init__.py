"""The front door of a cluster of ours: one decider before workers that answer HTTP themselves."""
