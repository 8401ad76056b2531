"""On a NeMo-Run that a patch is not needed on there is nothing of it to test."""

from tests.patches.dgxcloud import ID

collect_ignore = ["test_dgxcloud_legacy_kwargs.py"] if ID == "app_id" else []
