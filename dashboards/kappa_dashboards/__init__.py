"""Grafana dashboards, recording rules and alerts: made from the metrics, checked against them."""
