"""Where a runtime's socket is in these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.deviceplugin.harness import short_folder


@pytest.fixture
def socket() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "runtime.sock"
