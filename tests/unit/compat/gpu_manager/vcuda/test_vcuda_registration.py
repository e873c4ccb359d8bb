"""The container of a socket, refusals, and one lookup shared by concurrent registrations."""

import asyncio
import struct
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from gpumgr.common.errors import CriError
from gpumgr.compat.gpu_manager.vcuda import registration
from gpumgr.compat.gpu_manager.vcuda.registration import ROUTE, ContainerOf, HasMounted, RegistrationService, belongs
from gpumgr.compat.gpu_manager.vcuda.slot import ContainerSlot, RegistrationBatches
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import Container
from tests.unit.compat.gpu_manager.vcuda.tenants import CONTAINER, TENANT


def test_a_container_is_identified_by_pod_uid_and_name() -> None:
    assert belongs(CONTAINER, TENANT) == "yes"
    assert belongs(replace(CONTAINER, name="sidecar"), TENANT) == "no"
    assert belongs(replace(CONTAINER, pod_uid="another"), TENANT) == "no"


def test_a_static_pod_has_another_uid_in_the_runtime() -> None:
    """The API server has the UID of its mirror, cgroups and runtime the hash of its file."""
    static = replace(CONTAINER, pod_uid="8f2c1d5e7a9b4c6d8e0f1a2b3c4d5e6f")
    assert belongs(static, TENANT) == "no"
    assert belongs(static, replace(TENANT, runtime_uid=static.pod_uid)) == "yes"
    assert belongs(CONTAINER, replace(TENANT, runtime_uid=static.pod_uid)) == "yes"
    assert belongs(static, replace(TENANT, pod_uid=None, runtime_uid=static.pod_uid)) == "yes"
    assert belongs(CONTAINER, replace(TENANT, pod_uid=None, runtime_uid=static.pod_uid)) == "no"


def test_without_a_uid_the_pods_name_decides() -> None:
    nameless = replace(TENANT, pod_uid=None)
    assert belongs(CONTAINER, nameless) == "yes"
    assert belongs(replace(CONTAINER, pod=("demo", "other")), nameless) == "no"


def test_a_missing_name_leaves_it_unclear_unless_the_others_differ() -> None:
    unknown = replace(TENANT, container=None)
    assert belongs(CONTAINER, unknown) == "unclear"
    assert belongs(replace(CONTAINER, pod_uid="another"), unknown) == "no"
    assert belongs(CONTAINER, replace(unknown, pod=None, pod_uid=None)) == "unclear"
    assert belongs(CONTAINER, replace(TENANT, pod=None, pod_uid=None)) == "unclear"
    assert belongs(replace(CONTAINER, name="sidecar"), replace(TENANT, pod=None, pod_uid=None)) == "no"


@dataclass
class Desk:
    """Replaces ContainerSlot: records the processes that register."""

    failure: OSError | None = None
    tenant: GpuShare = TENANT
    entered: list[int] = field(default_factory=list)

    def register(self, _container: Container, clients: Collection[int]) -> None:
        if self.failure is not None:
            raise self.failure
        self.entered += clients

    def service(self, container_of: ContainerOf, has_mounted: HasMounted) -> RegistrationService:
        return RegistrationService({TENANT.allocation: cast("ContainerSlot", self)}, container_of, has_mounted)

    __hash__ = object.__hash__


class Call:
    """A gRPC call from a process with this pid, as grpclib hands it to a method."""

    def __init__(self, pid: int, folder: str = TENANT.allocation) -> None:
        credentials = SimpleNamespace(getsockopt=lambda *_: struct.pack("3i", pid, 1000, 1000))
        self.peer = SimpleNamespace(
            _transport=SimpleNamespace(get_extra_info={"socket": credentials, "sockname": f"/x/{folder}/s"}.get)
        )
        self.sent: list[bytes] = []

    async def recv_message(self) -> bytes:
        return b""

    async def send_message(self, message: bytes) -> None:
        self.sent.append(message)


async def inside(_pid: int) -> Container | None:
    return CONTAINER


def nowhere(_pid: int, _allocation: str) -> bool:
    return False


async def status_of(
    call: Call, desk: Desk, container_of: ContainerOf = inside, has_mounted: HasMounted = nowhere
) -> tuple[Status, str]:
    service = desk.service(container_of, has_mounted)
    with pytest.raises(GRPCError) as caught:
        await service.__mapping__()[ROUTE].func(call)
    assert service.outcomes == {caught.value.status.name.lower(): 1}
    assert not desk.entered
    assert not call.sent
    return caught.value.status, caught.value.message or ""


async def test_a_peer_without_a_pid_means_a_missing_host_pid() -> None:
    status, sentence = await status_of(Call(0), Desk())
    assert status is Status.PERMISSION_DENIED
    assert sentence.endswith("gpumgr must run in the host's pid namespace (hostPID)")


async def test_an_allocation_that_is_gone() -> None:
    status, sentence = await status_of(Call(1, folder="0" * 16), Desk())
    assert (status, sentence) == (Status.NOT_FOUND, "no container has the allocation 0000000000000000")


async def test_a_full_disk_is_worth_another_try() -> None:
    status, sentence = await status_of(Call(1), Desk(failure=OSError(28, "No space left on device")))
    assert (status, sentence) == (Status.UNAVAILABLE, "gpumgr can't write the container's pids.config: No space left on device")


async def test_a_runtime_that_hangs_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(_pid: int) -> Container | None:
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(registration, "_CONTAINER_TIMEOUT_SECONDS", 0.01)
    status, sentence = await status_of(Call(4712), Desk(), hangs)
    assert status is Status.UNAVAILABLE
    assert sentence == "the container of process 4712 could not be determined within 0.01 s"


async def test_a_runtime_that_is_away_is_worth_another_try() -> None:
    async def nothing(_pid: int) -> Container | None:
        raise CriError("no cgroups here")

    status, sentence = await status_of(Call(4712), Desk(), nothing)
    assert (status, sentence) == (Status.UNAVAILABLE, "the container of process 4712 can't be determined: no cgroups here")


async def test_a_bug_is_an_answer_too() -> None:
    async def breaks(_pid: int) -> Container | None:
        raise KeyError("bug")

    status, sentence = await status_of(Call(4712), Desk(), breaks)
    assert (status, sentence) == (Status.INTERNAL, "gpumgr failed (KeyError: 'bug'); its log has the details")


class Slot:
    """Replaces ContainerSlot: records the clients of each batch; every batch lasts until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[set[int]] = []
        self.began, self.go = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def register(self, _container: Container, clients: Collection[int]) -> None:
        self.batches.append(set(clients))
        self.began.set()
        self.go.wait()
        if self.failure is not None:
            raise self.failure


def registering(batches: RegistrationBatches, slot: Slot, pid: int) -> "asyncio.Task[None]":
    return asyncio.create_task(batches.register(cast("ContainerSlot", slot), CONTAINER, pid))


async def test_calls_that_arrive_during_a_batch_share_the_next() -> None:
    slot, other, batches = Slot(), Slot(), RegistrationBatches()
    calls = [registering(batches, slot, 1)]
    await asyncio.to_thread(slot.began.wait)
    calls += [registering(batches, slot, pid) for pid in range(2, 51)]
    calls += [registering(batches, other, 51)]
    await asyncio.sleep(0)
    slot.go.set()
    other.go.set()
    await asyncio.gather(*calls)
    assert (slot.batches, other.batches) == ([{1}, set(range(2, 51))], [{51}])


async def test_a_failure_affects_neither_other_containers_nor_later_calls() -> None:
    slot, other, batches = Slot(), Slot(), RegistrationBatches()
    slot.go.set()
    other.go.set()
    slot.failure = OSError("disk full")
    failing, good = registering(batches, slot, 1), registering(batches, other, 2)
    with pytest.raises(OSError, match="disk full"):
        await failing
    await good
    slot.failure = None
    await registering(batches, slot, 3)
    assert (slot.batches, other.batches) == ([{1}, {3}], [{2}])


async def test_a_cancelled_call_stops_no_batch() -> None:
    slot, batches = Slot(), RegistrationBatches()
    cancelled, other = (registering(batches, slot, pid) for pid in (1, 2))
    await asyncio.to_thread(slot.began.wait)
    cancelled.cancel()
    slot.go.set()
    await other
    assert slot.batches == [{1, 2}]
