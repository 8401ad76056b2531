"""The patch of a file; on a NeMo-Run that needs none there is nothing of it to test."""

from collections.abc import Iterator

import pytest

from tests.conftest import patched
from tests.patches.dgxcloud import ID

collect_ignore = ["test_dgxcloud_legacy_kwargs.py"] if ID == "app_id" else []


@pytest.fixture
def applied(request) -> Iterator[None]:
    """With the patch that the test's file is named after."""
    with patched(request.module.__name__.rpartition("test_")[2]):
        yield
