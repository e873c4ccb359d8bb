"""Names of the sockets."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.kubelet.dra_registration import socket_paths

DRIVER = "gpu.gpumgr.io"
KUBELET = Path("/var/lib/kubelet")
UID = "5b0a52ec-3c1c-4b8e-9d5f-0d0f8a8f7c11"


def names(instance: str | None, root: Path = KUBELET) -> tuple[str, str]:
    dra, registration = socket_paths(root / "plugins", root / "plugins_registry", instance)
    assert (dra.parent, registration.parent) == (root / "plugins" / DRIVER, root / "plugins_registry")
    return dra.name, registration.name


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (None, ("dra.sock", f"{DRIVER}-reg.sock")),
        (UID, (f"dra-{UID}.sock", f"{DRIVER}-{UID}-reg.sock")),
        ("a/b", ("dra-c14cddc033f64b9d.sock", f"{DRIVER}-c14cddc033f64b9d-reg.sock")),
    ],
)
def test_names(instance: str | None, expected: tuple[str, str]) -> None:
    assert names(instance) == expected


@pytest.mark.parametrize(("length", "hashed"), [(50, False), (51, True), (255, True)])
def test_an_instance_with_which_a_path_is_too_long_is_hashed(length: int, hashed: bool) -> None:
    """/var/lib/kubelet/plugins_registry/gpu.gpumgr.io-INSTANCE-reg.sock has 57 bytes without the instance."""
    dra, registration = names("i" * length)
    assert ("i" * length in registration) is not hashed
    assert dra.removeprefix("dra-").removesuffix(".sock") == registration.removeprefix(f"{DRIVER}-").removesuffix("-reg.sock")


@given(st.text(min_size=1, max_size=150).filter(lambda text: "\0" not in text and text.isprintable()))
def test_every_instance_has_paths_that_fit_and_no_other_has_them(instance: str) -> None:
    for path in socket_paths(KUBELET / "plugins", KUBELET / "plugins_registry", instance):
        assert len(os.fsencode(path)) <= 107
    assert names(instance) != names(instance + "x") != names(None)


def test_relative_folders_become_absolute() -> None:
    assert all(path.is_absolute() for path in socket_paths(Path("plugins"), Path("registry"), None))
