"""The only place that speaks HTTP to a Ray dashboard."""
