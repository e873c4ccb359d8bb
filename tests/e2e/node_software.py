"""The kubelet and the container runtime of the node: those that all tests run, and an older pair."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import manifests
from .places import KUBERNETES, OLDER_KUBELET, STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSoftware:
    """`runtime` is the folder of containerd, its shim and ctr; `state` is the folder of its images and containers, which is not shared."""

    kubelet: Path
    kubelet_version: str
    runtime: Path
    state: Path

    @property
    def containerd(self) -> Path:
        return self.runtime / "containerd"

    @property
    def ctr(self) -> Path:
        return self.runtime / "ctr"

    def environment(self) -> Mapping[str, str]:
        """Of containerd, which looks for its shim in PATH."""
        return {"PATH": f"{self.runtime}:{os.environ['PATH']}"}

    def write_config(self) -> Path:
        """Writes containerd's configuration; returns the file."""
        path = self.state.with_suffix(".toml")
        path.write_text(manifests.containerd_config(self.state))
        return path


def current(binaries: Path) -> NodeSoftware:
    """What is built from Go modules; `binaries` is the folder of the builds."""
    kubelet, runtime = binaries / "kubernetes" / "kubelet", binaries / "containerd"
    return NodeSoftware(kubelet=kubelet, kubelet_version=KUBERNETES, runtime=runtime, state=STATE / "containerd")


def older(binaries: Path) -> NodeSoftware:
    """The last kubelet that accepts containerd 1.x, with Debian's containerd, which has no CDI."""
    kubelet, runtime = binaries / "older" / "kubelet", Path("/usr/bin")
    return NodeSoftware(kubelet=kubelet, kubelet_version=OLDER_KUBELET, runtime=runtime, state=STATE / "containerd-debian")
