"""Libraries that a real loader loads, and what the probe says of them."""

import os
from pathlib import Path

import pytest

from gpumgr.enforcement.hami_core import probe
from gpumgr.enforcement.operator_library import CheckedLibrary, LibraryError, check
from tests.libvgpu import build


def made(folder: Path, *flags: str) -> CheckedLibrary:
    path = folder / "libvgpu.so"
    return check(path, build(path, *flags), exports=probe.EXPORTS)


@pytest.mark.parametrize("flags", [(), ("-DNEEDS", "-Wl,-z,lazy")], ids=["all functions", "without one that is never called"])
def test_a_library_with_the_functions_and_the_layout_is_usable(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert probe.refusal(made(tmp_path, *flags)) is None


def test_the_drivers_library_need_not_be_there(tmp_path: Path) -> None:
    """Some builds name libcuda.so.1 as needed."""
    driver = tmp_path / "libcuda.so.1"
    build(driver, "-Wl,-soname,libcuda.so.1")
    library = made(tmp_path, "-Wl,--no-as-needed", str(driver))
    driver.unlink()
    assert probe.refusal(library) is None


def test_functions_of_the_driver_do_not_count(tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    build(driver, "-Wl,-soname,libcuda.so.1")
    with pytest.raises(LibraryError, match=r"does not export cuDeviceTotalMem_v2, .* not as Release"):
        made(tmp_path, "-DHIDDEN", "-Wl,--no-as-needed", str(driver))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
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


def test_a_library_that_waits_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TIMEOUT_SECONDS", 0.01)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    assert "it made no region within" in (probe.refusal(made(tmp_path, "-DSLOW")) or "")
    assert children.read_text() == before


def test_a_library_replaced_while_it_is_tried_has_no_result(tmp_path: Path) -> None:
    library = made(tmp_path)
    build(library.path, "-DOLD")
    with pytest.raises(LibraryError, match="put the right file there"):
        probe.refusal(library)
