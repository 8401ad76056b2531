"""NeMo-Skills on Ray: what its own commands need to start their tasks through this package."""
