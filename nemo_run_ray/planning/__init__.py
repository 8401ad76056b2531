"""From NeMo-Run's app and executor to what is sent: pure functions."""
