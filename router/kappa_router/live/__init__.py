"""The router in a running cluster: who is there, what is reported, what is shown."""
