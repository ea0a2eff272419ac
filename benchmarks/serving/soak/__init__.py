"""Mixed load for hours, with faults in between, and what every process kept of it."""
