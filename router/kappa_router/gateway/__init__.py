"""The front door: Envoy, which every byte passes, and the decider, which none of an answer does."""
