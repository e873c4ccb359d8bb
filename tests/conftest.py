"""For all tests: on CI, Hypothesis draws the same examples in each run, so that a change is judged by itself; elsewhere new ones. How
long that takes tells of the machine alone, and fails nothing. A command that a test runs in its own process leaves no log settings
behind."""

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("anywhere"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")


@pytest.fixture(autouse=True)
def _log_as_ever() -> Iterator[None]:
    yield
    structlog.reset_defaults()
