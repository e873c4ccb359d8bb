"""The backend `vcuda`: files and a socket for each tenant; the library in the container does the rest."""

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.operator_library import LibraryError, check
from gpumgr.enforcement.vcuda import files
from gpumgr.enforcement.vcuda.listener import Listener, path_problem
from gpumgr.enforcement.vcuda.mounts import has_mounted
from gpumgr.enforcement.vcuda.pids import MOST_PIDS
from gpumgr.enforcement.vcuda.registration import ContainerOf, HasMounted, RegistrationService
from gpumgr.enforcement.vcuda.rounds import Rounds
from gpumgr.enforcement.vcuda.ward import PidsOf, Ward
from gpumgr.errors import GpumgrError, Refusal
from gpumgr.units import Kind
from gpumgr.usage.containers import Container

_log = structlog.get_logger(__name__)

#: The names that gpumgr gives allocations. gpu-manager's folders lie beside ours and are called otherwise.
_ALLOCATION: Final = re.compile("[0-9a-f]{16}")
#: What containers find in the place of libcuda.so.1.
LIBRARY: Final = "libcuda-control.so"
_CLOSE_GRACE_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Seat:
    """What is kept for one tenant."""

    ward: Ward
    rounds: Rounds
    listener: Listener | None = None


class VcudaBackend:
    """See backend.Backend. `container_of` and `pids_of` tell whose a process is and what runs in a container.

    `driver_files_obstacle` says why containers would get the driver's files without the library in them (None: they get it).
    """

    def __init__(
        self,
        *,
        allocation_dir: Path,
        library_path: Path | None,
        library_sha256: str | None,
        container_of: ContainerOf,
        pids_of: PidsOf,
        driver_files_obstacle: Callable[[], str | None] = lambda: None,
        has_mounted: HasMounted = has_mounted,
    ) -> None:
        self._allocation_dir = allocation_dir
        self._library_path = library_path
        self._library_sha256 = library_sha256
        self._pids_of = pids_of
        self._driver_files_obstacle = driver_files_obstacle
        self._seats: dict[AllocationId, _Seat] = {}
        self._said: dict[AllocationId, str] = {}
        self._said_of_folder: str | None = None
        self._service = RegistrationService(self, container_of, has_mounted)

    @property
    def name(self) -> BackendName:
        return "vcuda"

    @property
    def limits(self) -> frozenset[Kind]:
        return frozenset({"core", "memory"})

    @property
    def registrations(self) -> Mapping[str, int]:
        """How many registrations ended how since the start: "ok", or a gRPC status in small letters."""
        return self._service.outcomes

    async def unavailable(self) -> str | None:
        if self._library_path is None or self._library_sha256 is None:
            return f"vcuda needs a {LIBRARY}: set vcuda.library_path and vcuda.library_sha256"
        try:
            await asyncio.to_thread(check, self._library_path, self._library_sha256)
        except LibraryError as error:
            return str(error)
        if (obstacle := self._driver_files_obstacle()) is not None:
            return f"containers get no {LIBRARY}: {obstacle}"
        return path_problem(self._allocation_dir / ("0" * 16) / files.SOCKET)

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:  # noqa: ARG002 (the same for every tenant)
        """NVIDIA's container runtime must not put the driver's own libcuda.so.1 before the operator's library."""
        return ContainerResponse(envs={"NVIDIA_VISIBLE_DEVICES": "void"} if kind == "core" else {})

    async def start(self, tenant: Tenant) -> None:
        """Needs no names: folder and socket are the allocation's."""
        if (reason := await self.unavailable()) is not None:
            raise Refusal("internal", f"the limits of {tenant.describe()} can't be kept: {reason}")
        seat = self._seat(tenant)
        try:
            await asyncio.to_thread(seat.ward.lay_out, tenant)
            await self._listen(seat)
        except OSError as error:
            raise Refusal("internal", f"{seat.ward.folder} can't be made ready: {error.strerror or error}") from error

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        ours = [(self._seats[each.tenant.allocation].ward, each) for each in self._ours(running)]
        return await asyncio.to_thread(self._look, ours) if ours else ()

    async def adjust(self, running: Sequence[Running]) -> None:
        ours = self._ours(running)
        if not ours:
            return
        await asyncio.to_thread(self._keep, [(self._seats[r.tenant.allocation].ward, r) for r in ours])
        for one in ours:
            seat = self._seats.get(one.tenant.allocation)
            if seat is not None and (seat.listener is None or not seat.listener.in_place):
                await self._listen_if_possible(seat)

    def remains(self) -> Collection[AllocationId]:
        found = set(self._seats)
        try:
            names = os.listdir(self._allocation_dir)
        except FileNotFoundError:
            return found
        except OSError as error:
            if (text := f"{self._allocation_dir}: {error.strerror or error}") != self._said_of_folder:
                self._said_of_folder = text
                _log.warning("vcuda_not_looked_at", reason=text)
            return found
        return found | {n for n in names if _ALLOCATION.fullmatch(n) and files.holds_ours(self._allocation_dir / n)}

    async def cleanup(self, allocation: AllocationId) -> None:
        seat = self._seats.pop(allocation, None)
        self._said.pop(allocation, None)
        self._service.forget(allocation)
        if seat is not None and seat.listener is not None:
            await seat.listener.close(0)
        await asyncio.to_thread(files.remove, self._allocation_dir / allocation)

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        seats = [self._seat(tenant) for tenant in tenants]
        await asyncio.to_thread(self._take_over, [seat.ward for seat in seats])
        for seat in seats:
            await self._listen_if_possible(seat)

    def own_pids(self) -> Collection[int]:
        return ()

    async def close(self) -> None:
        listeners = [seat.listener for seat in self._seats.values() if seat.listener is not None]
        await asyncio.gather(*(listener.close(_CLOSE_GRACE_SECONDS) for listener in listeners))

    # -- what the service asks -----------------------------------------------------------------------------------------------

    def tenant(self, allocation: AllocationId) -> Tenant | None:
        seat = self._seats.get(allocation)
        return seat.ward.tenant if seat else None

    async def enter(self, allocation: AllocationId, container: Container, pid: int) -> None:
        if (seat := self._seats.get(allocation)) is not None:
            await seat.rounds.join(container, pid)

    # -- seats -----------------------------------------------------------------------------------------------------------------

    def _seat(self, tenant: Tenant) -> _Seat:
        if (seat := self._seats.get(tenant.allocation)) is None:
            ward = Ward(tenant, self._allocation_dir / tenant.allocation, self._pids_of)
            seat = self._seats[tenant.allocation] = _Seat(ward, Rounds(ward.register))
        return seat

    def _ours(self, running: Sequence[Running]) -> list[Running]:
        return [one for one in running if one.tenant.allocation in self._seats]

    async def _listen(self, seat: _Seat) -> None:
        """Raises Refusal if the path is too long, OSError."""
        path = seat.ward.folder / files.SOCKET
        if (reason := path_problem(path)) is not None:
            raise Refusal("internal", reason)
        if seat.listener is not None:
            if seat.listener.in_place:
                return
            await seat.listener.close(0)
        seat.listener = Listener(path, self._service)
        await seat.listener.listen()

    async def _listen_if_possible(self, seat: _Seat) -> None:
        try:
            await self._listen(seat)
        except (OSError, GpumgrError) as error:
            self._complain(seat.ward, error)

    def _take_over(self, wards: Sequence[Ward]) -> None:
        for ward in wards:
            try:
                ward.take_over()
            except (OSError, GpumgrError) as error:
                self._complain(ward, error)

    def _keep(self, running: Sequence[tuple[Ward, Running]]) -> None:
        for ward, one in running:
            try:
                ward.keep(one)
            except (OSError, GpumgrError) as error:
                self._complain(ward, error)

    def _complain(self, ward: Ward, error: Exception) -> None:
        """Logs what keeps one tenant from its files or its socket, once."""
        allocation, text = ward.tenant.allocation, str(error)
        if self._said.get(allocation) != text:
            self._said[allocation] = text
            _log.warning("vcuda_not_kept", allocation=allocation, tenant=ward.tenant.describe(), reason=text)

    def _look(self, running: Sequence[tuple[Ward, Running]]) -> list[Finding]:
        return [finding for ward, one in running for finding in (_unregistered(ward, one), _too_many(one)) if finding]


def _unregistered(ward: Ward, running: Running) -> Finding | None:
    strangers = ward.strangers(running)
    if not strangers:
        return None
    pids = ", ".join(map(str, strangers[:10])) + (", ..." if len(strangers) > 10 else "")
    message = (
        f"{running.tenant.describe()} uses its GPU past {LIBRARY} (pid {pids}), so no limit holds there: "
        "its LD_LIBRARY_PATH must begin with /usr/local/nvidia/lib64, and the image must bring no libcuda.so.1 of its own"
    )
    return Finding(allocation=running.tenant.allocation, code="unregistered", message=message)


def _too_many(running: Running) -> Finding | None:
    if (count := len(running.pids)) <= MOST_PIDS:
        return None
    message = (
        f"{running.tenant.describe()} has {count} processes and pids.config holds {MOST_PIDS}: those that use the GPU come first, then "
        f"the lowest pids; memory of {count - MOST_PIDS} would not be counted. Run fewer processes in one container"
    )
    return Finding(allocation=running.tenant.allocation, code="broken", message=message)
