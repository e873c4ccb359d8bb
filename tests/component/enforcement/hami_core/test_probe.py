"""Libraries that a real loader loads, and what the probe says of them."""

import os
from pathlib import Path

import pytest

from gpumgr.enforcement.hami_core import probe
from gpumgr.enforcement.operator_library import CheckedLibrary, LibraryError, check
from tests.libvgpu import build


def made(folder: Path, *flags: str) -> CheckedLibrary:
    path = folder / "libvgpu.so"
    return check(path, build(path, *flags))


def test_a_library_with_all_functions_and_the_layout_is_usable(tmp_path: Path) -> None:
    assert probe.refusal(made(tmp_path)) is None


def test_a_function_that_is_never_called_may_be_missing(tmp_path: Path) -> None:
    assert probe.refusal(made(tmp_path, "-DNEEDS", "-Wl,-z,lazy")) is None


def test_the_drivers_library_need_not_be_there(tmp_path: Path) -> None:
    """Some builds name libcuda.so.1 as needed."""
    driver = tmp_path / "libcuda.so.1"
    build(driver, "-Wl,-soname,libcuda.so.1")
    library = made(tmp_path, "-Wl,--no-as-needed", str(driver))
    driver.unlink()
    assert probe.refusal(library) is None


def test_functions_of_the_driver_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "libcuda.so.1"
    build(driver, "-Wl,-soname,libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    reason = probe.refusal(made(tmp_path, "-DHIDDEN", "-Wl,--no-as-needed", str(driver)))
    assert "it does not export cuInit" in (reason or "")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("-DHIDDEN",), "it does not export cuInit (it has 1 of 12 needed functions)"),
        (("-DDIRTY",), "its region has another layout: it is 32 bytes longer"),
        (("-DOLD",), "its region has another layout: it has version 1.1 instead of v1.2"),
        (("-DCRASH",), "a process that loads it ends with status -6"),
        (("-DNEEDS", "-Wl,-z,now"), "undefined symbol: function_of_no_library"),
    ],
)
def test_a_wrong_library_is_refused_with_the_reason_and_what_to_do(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    refused = probe.refusal(made(tmp_path, *flags)) or ""
    assert refused.startswith(f"{tmp_path}/libvgpu.so is not usable: ")
    assert reason in refused
    assert "build HAMi-core 1.2 or newer" in refused


def test_a_library_that_waits_is_ended_and_tried_again_at_the_next_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TIMEOUT_SECONDS", 0.01)
    library = made(tmp_path, "-DSLOW")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    for _ in range(2):
        with pytest.raises(LibraryError, match="made no region within"):
            probe.refusal(library)
    assert children.read_text() == before


def test_a_library_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = made(tmp_path)
    assert probe.refusal(library) is None
    monkeypatch.setattr(probe, "_TIMEOUT_SECONDS", -1)  # a second process would raise
    assert probe.refusal(library) is None


def test_a_library_replaced_while_it_is_tried_has_no_result(tmp_path: Path) -> None:
    library = made(tmp_path)
    build(library.path, "-DOLD")
    with pytest.raises(LibraryError, match="put the right file there"):
        probe.refusal(library)
