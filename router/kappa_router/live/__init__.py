"""The router in a running cluster: its members, their reports, and views of both."""
