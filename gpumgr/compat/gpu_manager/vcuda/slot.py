"""The folder, the socket and the registered processes of one allocation, and the batches in which registrations are written."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration

from gpumgr.agent.ports import RunningContainer
from gpumgr.common.errors import GpumgrError
from gpumgr.common.proc import parent_pid
from gpumgr.common.rpc.server import DrainingServer, ServedConnection
from gpumgr.common.unix_socket import UnixSocket
from gpumgr.compat.gpu_manager.vcuda import files
from gpumgr.compat.gpu_manager.vcuda.files import INIT_PID, pack_config, pack_pids, unpack_pids
from gpumgr.enforcement.operator_library import make_folder
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import Container

_MODE: Final = 0o666
_BACKLOG: Final = 128
#: Connections of one container at a time. A registration takes milliseconds, and a refused client retries.
_MOST_CONNECTIONS: Final = 128
#: Longer than any client waits for an answer.
_MOST_CONNECTION_SECONDS: Final = 30.0
#: A registration has some hundred bytes, but h2 itself would collect up to 16 MiB of a frame before it refuses the frame.
_MOST_CONNECTION_BYTES: Final = 256 * 1024
#: The smallest window that grpclib allows; it bounds the unread bytes of a connection.
_WINDOW_BYTES: Final = 65535
#: Validates headers, which grpclib's own configuration does not.
_CHECKED: Final = H2Configuration(client_side=False, header_encoding="ascii")


class RegistrationListener(DrainingServer):
    """Serves `service` at `path`, once. The socket's file stays when the listener ends; a restarted agent replaces it. The clients are not
    trusted, so h2 checks their headers, and each gets little memory.
    """

    def __init__(self, path: Path, service: Any) -> None:
        windows = Configuration(http2_connection_window_size=_WINDOW_BYTES, http2_stream_window_size=_WINDOW_BYTES)
        super().__init__([service], config=windows)
        self._socket = UnixSocket(path, mode=_MODE)

    @property
    def in_place(self) -> bool:
        """Whether the socket's file is still the one that this listener made."""
        return self._socket.in_place

    async def listen(self) -> None:
        """Replaces the socket of an earlier process of the agent. Raises OSError."""
        await self.start(sock=self._socket.bind(replace_served=True), backlog=_BACKLOG)

    def connection(self, made: H2Protocol) -> H2Protocol:
        return _LimitedConnection(self, made, _CHECKED)


class _LimitedConnection(ServedConnection):
    """Limits time and bytes of one connection, and the number of connections, before bytes reach HTTP/2."""

    _end: asyncio.TimerHandle | None = None
    _received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self.server.connections) >= _MOST_CONNECTIONS:
            cast("asyncio.Transport", transport).abort()
            return
        self._end = asyncio.get_running_loop().call_later(_MOST_CONNECTION_SECONDS, transport.close)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > _MOST_CONNECTION_BYTES:
            self.transport.abort()
            return
        try:
            super().data_received(data)
        except Exception:  # h2 fails by itself for some bytes, such as headers that are not ASCII
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._end is not None:  # None: `connection_made` has refused it
            self._end.cancel()
            super().connection_lost(exc)


#: The host's pids of all processes in a container's cgroup and below; none if the cgroup is not known. Blocks. Raises GpumgrError.
PidsOf = Callable[[Container], Collection[int]]
#: One thread for all batches: several would only compete for the interpreter.
_THREAD: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vcuda_register")


class ContainerSlot:
    """The folder of one allocation. Methods that are not coroutines block for file operations; any thread may call them.

    One lock is held from the listing of pids until they are written, so an older listing never overwrites a newer one.
    """

    def __init__(self, tenant: GpuShare, folder: Path, pids_of: PidsOf) -> None:
        self.tenant = tenant
        self.folder: Final = folder
        self._pids_of = pids_of
        self._listener: RegistrationListener | None = None
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        self._on_gpu: frozenset[int] = frozenset()
        #: Container id -> container. Several containers can use one ResourceClaim.
        self._containers: Mapping[str, Container] = {}

    async def listen(self, service: Any) -> None:
        if self._listener is not None and self._listener.in_place:
            return
        await self.stop_listening(0)
        self._listener = RegistrationListener(self.folder / files.SOCKET, service)
        await self._listener.listen()

    async def stop_listening(self, grace_seconds: float) -> None:
        if self._listener is not None:
            await self._listener.drain(grace_seconds)

    def prepare_start(self, tenant: GpuShare) -> None:
        """Writes both files before the container starts. Raises Refusal for names that do not fit, and OSError."""
        with self._lock:
            self.tenant = tenant
            self._registered.clear()
            self._on_gpu, self._containers = frozenset(), {}
            self._write_config()
            files.replace(self.folder, files.PIDS, pack_pids([INIT_PID]))

    def take_over(self) -> None:
        """Adopts the files of an earlier agent. All pids in pids.config count as registered, because no file records which processes have
        registered. Raises Refusal for names that do not fit, and OSError."""
        with self._lock:
            self._write_config()
            known = unpack_pids(files.read(self.folder, files.PIDS) or b"")
            self._registered.update(known)
            if not known:
                files.replace(self.folder, files.PIDS, pack_pids([INIT_PID]))

    def update(self, running: RunningContainer) -> None:
        """Updates both files. The pids are listed again, because a process may have registered after `running` was listed, and must stay
        in the file. Raises GpumgrError, OSError."""
        with self._lock:
            self.tenant = running.tenant
            self._on_gpu = running.gpu_pids
            self._write_config()
            self._containers = {each.id: each for each in running.containers}
            self._write_pids({pid for each in running.containers for pid in self._pids_of(each)})

    def register(self, containers: Mapping[str, Container], clients: Collection[int]) -> None:
        """Adds `clients` (processes of gpu-client) and their parents, which will use the GPU. `containers`: by id. Raises OSError."""
        with self._lock:
            parents = {parent for pid in clients if (parent := parent_pid(pid)) is not None}
            self._registered |= parents.union(clients)
            self._containers = {**self._containers, **containers}
            found = set[int]()
            for each in self._containers.values():
                with suppress(GpumgrError):  # `update` reports it
                    found.update(self._pids_of(each))
            self._write_pids(found, clients)

    def unregistered(self, running: RunningContainer) -> tuple[int, ...]:
        """Processes on the GPU that have not registered and have no registered ancestor in the container, ascending.

        A child that did not execute another program shares the library of its parent, which registers only once.
        """
        with self._lock:
            inside = frozenset(running.pids)
            for pid in running.gpu_pids - self._registered:
                ancestor: int | None = pid
                while ancestor is not None and ancestor in inside and ancestor not in self._registered:
                    ancestor = parent_pid(ancestor)
                if ancestor in inside & self._registered:
                    self._registered.add(pid)
            return tuple(sorted(running.gpu_pids - self._registered))

    def _write_config(self) -> None:
        config = pack_config(self.tenant)
        make_folder(self.folder)
        files.replace(self.folder, files.CONFIG, config)

    def _write_pids(self, found: Collection[int], clients: Collection[int] = ()) -> None:
        """Writes the listed pids and `clients`. While no process is listed, no pid is dropped from the file."""
        pids = set(found)
        if not pids:
            pids.update(unpack_pids(files.read(self.folder, files.PIDS) or b""))
            pids.update(self._registered, [each.pid or INIT_PID for each in self._containers.values()])
        pids.update(clients)
        self._registered &= pids
        files.replace(self.folder, files.PIDS, pack_pids(pids, first=self._registered | self._on_gpu))


class _Registration(msgspec.Struct):
    """The clients of one allocation that wait for a batch. The result of `done` is an error or None."""

    containers: dict[str, Container]
    clients: set[int]
    done: "asyncio.Future[Exception | None]"


class RegistrationBatches:
    """Registers the processes of all containers in batches on a thread. A batch lists each container's processes once.

    A call during a batch joins the next one, so the processes are listed after the call and include the caller.
    """

    def __init__(self) -> None:
        self._waiting: dict[ContainerSlot, _Registration] = {}
        self._task: asyncio.Task[None] | None = None

    async def register(self, slot: ContainerSlot, container: Container, pid: int) -> None:
        """Returns when a batch with `pid` has ended; a cancelled caller does not stop it. Raises OSError."""
        entry = self._waiting.get(slot)
        if entry is None:
            future = asyncio.get_running_loop().create_future()
            entry = self._waiting[slot] = _Registration({}, set(), future)
        entry.containers[container.id] = container
        entry.clients.add(pid)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vcuda_register")
        if (error := await asyncio.shield(entry.done)) is not None:
            raise error

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            errors = await asyncio.get_running_loop().run_in_executor(_THREAD, _register_all, batch)
            for entry, error in zip(batch.values(), errors, strict=True):
                entry.done.set_result(error)


def _register_all(batch: Mapping[ContainerSlot, _Registration]) -> list[Exception | None]:
    """The errors (None: registered), in the order of `batch`. A container that fails does not affect the others."""
    errors: list[Exception | None] = []
    for slot, entry in batch.items():
        try:
            slot.register(entry.containers, entry.clients)
            errors.append(None)
        except Exception as error:
            errors.append(error)
    return errors
