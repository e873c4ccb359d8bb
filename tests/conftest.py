"""For all tests: on CI, Hypothesis draws the same examples in each run, so that a change is judged by itself; elsewhere new ones.
A command that a test runs in its own process leaves no log settings behind."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _log_as_ever() -> Iterator[None]:
    yield
    structlog.reset_defaults()
