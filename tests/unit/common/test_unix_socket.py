"""Which files at a socket's path are replaced, and which are left alone."""

import errno
import os
import stat
from pathlib import Path

import pytest

from gpumgr.common.unix_socket import MAX_PATH_BYTES, UnixSocket, path_problem


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "own.sock"


def refusal(made: UnixSocket) -> int | None:
    with pytest.raises(OSError, match=r"there|bytes") as caught:
        made.bind()
    return caught.value.errno


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_the_file_has_its_mode_with_any_umask(path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with UnixSocket(path, mode=mode).bind():
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_an_abandoned_socket_is_replaced_and_removed_once(path: Path) -> None:
    UnixSocket(path).bind().close()
    made = UnixSocket(path)
    assert not made.in_place
    with made.bind():
        assert made.in_place
        made.remove()
        assert not path.exists()
        made.remove()


def test_a_served_socket_is_replaced_only_on_demand(path: Path) -> None:
    first, second = UnixSocket(path), UnixSocket(path)
    with first.bind() as serving:
        serving.listen(0)
        assert refusal(second) == errno.EADDRINUSE  # the first refusal has filled the backlog
        assert first.in_place
        with second.bind(replace_served=True):
            assert (first.in_place, second.in_place) == (False, True)
            first.remove()
            assert second.in_place


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_another_kind_of_file_is_left_alone(path: Path, kind: str) -> None:
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    before = path.lstat()
    made = UnixSocket(path)
    assert refusal(made) == errno.EEXIST
    made.remove()
    assert path.lstat() == before


def test_a_path_may_have_107_bytes(path: Path) -> None:
    longest = path.with_name("x" * (MAX_PATH_BYTES - len(str(path.parent)) - 1))
    assert path_problem(longest) is None
    UnixSocket(longest).bind().close()
    assert refusal(UnixSocket(longest.with_name(longest.name + "x"))) == errno.ENAMETOOLONG
