"""For all tests: Hypothesis' profile, the number of workers of `-n auto`, log settings that end with their test, short folders.

With CI set, Hypothesis draws the same examples in each run, so that a result depends on the change alone; else it draws new ones.
The time that an example takes fails no test, since it depends on the machine.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Many tests start an agent or a command. A Python that writes no bytecode would compile all modules of gpumgr at each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("anywhere"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for another process most of the time."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collection makes thousands of objects that all last: each search for garbage among them is in vain, then and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _default_log() -> Iterator[None]:
    """Resets structlog after each test."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for unix sockets, which allow 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as name:
        yield Path(name)
