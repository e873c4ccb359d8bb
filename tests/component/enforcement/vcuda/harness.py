"""A backend over a folder of its own, with a fake of the node's list of containers, and clients as containers run them."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import tests.kubelet_api  # noqa: F401 (puts proto/ on the import path)
from gpumgr.enforcement.vcuda.backend import VcudaBackend
from gpumgr.enforcement.vcuda.config import unpack_pids
from gpumgr.usage.containers import Container
from tests.unit.enforcement.vcuda.tenants import ALLOCATION, CONTAINER, TENANT

api, api_services = grpc.protos_and_services("vcuda/api.proto")

#: A shared library for this machine that every test run has; which one does not matter to the agent's side.
LIBRARY = Path(next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line))


@dataclass
class Node:
    """Every process is in the tenant's container, unless `places` says otherwise; `pids` run in it, and it has `mounted`."""

    folder: Path
    pids: set[int] = field(default_factory=set)
    places: dict[int, Container | None] = field(default_factory=dict)
    mounted: set[str] = field(default_factory=set)
    driver_files_obstacle: str | None = None
    environments: dict[int, bytes] = field(default_factory=dict)
    looks: int = 0

    async def container_of(self, pid: int) -> Container | None:
        return self.places.get(pid, CONTAINER)

    def pids_of(self, _container: Container) -> Collection[int]:
        self.looks += 1
        return tuple(self.pids)

    def backend(self, sha256: str | None, library: Path | None = LIBRARY) -> VcudaBackend:
        return VcudaBackend(
            allocation_dir=self.folder,
            library_path=library,
            library_sha256=sha256,
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


async def register(client: Path, socket: Path) -> Ended:
    """The library's call in the flat layout."""
    names = ["--pod-uid", str(TENANT.pod_uid), "--cont-name", "main"]
    return await run(client, "--addr", socket, "--bus-id", "", *names)


def stub(channel: Any) -> Any:
    return api_services.VCUDAServiceStub(channel)


def compile_c(source: Path, target: Path, *flags: str) -> Path:
    """A static program, as containers without libraries need it."""
    compiler = shutil.which("cc") or sys.exit("these tests need a C compiler")
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-static", "-Wall", "-Wextra", "-Werror", *flags, "-o", target, source], check=True
    )
    return target
