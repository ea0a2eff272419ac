"""The page at `/`: what nodes, decisions and tenants look like now, for a browser."""
