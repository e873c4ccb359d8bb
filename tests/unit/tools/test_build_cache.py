"""Two builders of the end-to-end cache: the second waits, and finds what the first made."""

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.build import alone_in, lock_of

_SECOND: Final = """
import sys
from pathlib import Path
from tests.e2e.build import alone_in

print("waits", flush=True)
with alone_in(Path(sys.argv[1])):
    print((Path(sys.argv[1]) / "root").read_text())
"""


def test_the_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "image"
    with alone_in(folder), lock_of(folder).open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        second = subprocess.Popen([sys.executable, "-c", _SECOND, str(folder)], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
        (folder / "root").write_text("made once")
    assert second.communicate(timeout=60)[0] == "made once\n"
    assert second.returncode == 0


def test_a_builder_that_fails_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), alone_in(tmp_path / "image"):
        raise RuntimeError("no network")
    with alone_in(tmp_path / "image"):
        assert list((tmp_path / "image").iterdir()) == []  # the lock is none of what is built
