"""Load plans: how a cached prefix is brought back, and what that is predicted to cost."""
