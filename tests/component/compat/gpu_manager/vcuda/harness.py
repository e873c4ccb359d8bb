"""A backend over a folder of its own, with a fake of the node's list of containers, and clients as containers run them."""

import asyncio
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

import tests.kubelet_api  # noqa: F401 (puts proto/ on the import path)
from gpumgr.compat.gpu_manager.vcuda.backend import EXPORTS, VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.files import unpack_pids
from gpumgr.ledger.node_use import Container
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, CONTAINER, TENANT

api, api_services = grpc.protos_and_services("vcuda/api.proto")

_BUILT: Final = tempfile.TemporaryDirectory(prefix="gpumgr")


@functools.cache
def library() -> Path:
    """A shared library that exports what the agent asks for; the agent's side needs nothing else of it."""
    return build_library(Path(_BUILT.name), *EXPORTS)


def build_library(folder: Path, *exports: str) -> Path:
    source, target = folder / "library.c", folder / "library.so"
    source.write_text(f"int {', '.join(exports)};\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)
    return target


@dataclass
class Node:
    """Every process is in the tenant's container, unless `places` says otherwise; `pids` run in it, and it has `mounted`. `inside`: the
    processes of other containers, by id. `client` is gpu-client."""

    folder: Path
    client: Path = Path("/missing")
    pids: set[int] = field(default_factory=set)
    places: dict[int, Container | None] = field(default_factory=dict)
    mounted: set[str] = field(default_factory=set)
    inside: dict[str, set[int]] = field(default_factory=dict)
    driver_files_obstacle: str | None = None
    environments: dict[int, bytes] = field(default_factory=dict)
    looks: int = 0

    async def container_of(self, pid: int) -> Container | None:
        return self.places.get(pid, CONTAINER)

    def pids_of(self, container: Container) -> Collection[int]:
        self.looks += 1
        return tuple(self.inside.get(container.id, self.pids))

    def backend(self, path: Path | None = None, *, sha256: str | None = None, with_library: bool = True) -> VcudaBackend:
        """`path`: another library; `sha256`: another sum than that of the library."""
        path = path or library()
        return VcudaBackend(
            allocation_dir=self.folder,
            library_path=path if with_library else None,
            library_sha256=(sha256 or hashlib.sha256(path.read_bytes()).hexdigest()) if with_library else None,
            container_of=self.container_of,
            pids_of=self.pids_of,
            driver_files_obstacle=lambda: self.driver_files_obstacle,
            environment_of=lambda pid: self.environments.get(pid, b""),
            has_mounted=lambda _pid, allocation: allocation in self.mounted,
        )

    @property
    def place(self) -> Path:
        """The tenant's folder."""
        return self.folder / ALLOCATION

    @property
    def socket(self) -> Path:
        return self.place / "vcuda.sock"

    async def register(self) -> "Ended":
        """The library's call in the flat layout."""
        names = ["--pod-uid", str(TENANT.pod_uid), "--cont-name", "main"]
        return await run(self.client, "--addr", self.socket, "--bus-id", "", *names)

    def listed(self) -> tuple[int, ...]:
        return unpack_pids((self.place / "pids.config").read_bytes())


@dataclass(frozen=True)
class Ended:
    """A client that has ended; `pid` is what it had."""

    status: int
    stdout: str
    stderr: str
    pid: int


async def run(*command: str | Path) -> Ended:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, error = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    return Ended(process.returncode or 0, out.decode(), error.decode(), process.pid)


def stub(channel: Any) -> Any:
    return api_services.VCUDAServiceStub(channel)


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    """A static program, as containers without libraries need it."""
    compiler = shutil.which("cc") or sys.exit("these tests need a C compiler")
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-static", "-Wall", "-Wextra", "-Werror", *flags, "-o", target, source], check=True
    )
    return target
