"""Names of the sockets."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpumgr.kubelet.dra_registration import socket_paths

KUBELET = Path("/var/lib/kubelet")


def names(instance: str | None) -> tuple[str, str]:
    dra, registration = socket_paths(KUBELET / "plugins", KUBELET / "plugins_registry", instance)
    assert (dra.parent, registration.parent) == (KUBELET / "plugins/gpu.gpumgr.io", KUBELET / "plugins_registry")
    assert max(len(os.fsencode(path)) for path in (dra, registration)) <= 107
    return dra.name, registration.name


def test_names() -> None:
    assert names(None) == ("dra.sock", "gpu.gpumgr.io-reg.sock")
    assert names("a/b") == ("dra-c14cddc033f64b9d.sock", "gpu.gpumgr.io-c14cddc033f64b9d-reg.sock")


@given(st.text(min_size=1, max_size=150))
def test_every_instance_has_paths_that_fit_and_no_other_has_them(instance: str) -> None:
    assert names(instance) != names(instance + "x") != names(None)


def test_relative_folders_become_absolute() -> None:
    assert all(path.is_absolute() for path in socket_paths(Path("plugins"), Path("registry"), None))
