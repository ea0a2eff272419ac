"""Who may ask, for how much, and how late: keys, tenants, limits, deadlines."""
