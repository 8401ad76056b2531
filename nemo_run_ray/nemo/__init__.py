"""What NeMo-Run calls, and its registries."""
