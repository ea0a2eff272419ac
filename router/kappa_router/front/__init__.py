"""`kappa route`: the router in front of OpenAI-compatible servers that exist."""
