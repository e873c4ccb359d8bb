"""Where a runtime's socket is in these tests."""

from pathlib import Path

import pytest


@pytest.fixture
def socket(folder: Path) -> Path:
    return folder / "runtime.sock"
