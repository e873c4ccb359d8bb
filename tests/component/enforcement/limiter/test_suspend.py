"""Suspended containers: their pages, and calls that wait outside of the driver until the container is resumed."""

import struct
from pathlib import Path

import pytest

from gpumgr.enforcement.limiter.page_files import PageFiles
from tests.component.enforcement.limiter.harness import Container


def _words(container: Container) -> tuple[int, int]:
    """`suspend` and `resume_requests`."""
    suspend, requests = (struct.unpack_from("<I", container.page(name).read_bytes(), 12)[0] for name in ("limits", "use"))
    return suspend, requests


@pytest.mark.parametrize("request_word", [1, 0xFFFFFFFF])
def test_the_agent_suspends_and_sees_the_request(tmp_path: Path, request_word: int) -> None:
    container = Container(tmp_path / "0")
    files = PageFiles.open(container.folder / "pages")
    container.request_resume(request_word)
    files.suspend()
    assert (files.suspended, files.resume_requested, _words(container)) == (True, False, (1, 0))
    container.request_resume(request_word)
    assert files.resume_requested
    files.resume()
    assert (files.suspended, _words(container)) == (False, (0, request_word))
    files.close()
