"""From NeMo-Run's app and executor to what is sent. No cluster and no clock is asked."""
