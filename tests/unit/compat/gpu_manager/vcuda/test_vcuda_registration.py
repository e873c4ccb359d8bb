"""The container of a socket, and one lookup shared by concurrent registrations."""

import asyncio
import threading
from collections.abc import Collection
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpumgr.compat.gpu_manager.vcuda.registration import belongs
from gpumgr.compat.gpu_manager.vcuda.slot import ContainerSlot, RegistrationBatches
from gpumgr.ledger.node_use import Container
from tests.unit.compat.gpu_manager.vcuda.tenants import CONTAINER, TENANT

OTHER_UID, OTHER_NAME = {"pod_uid": "another"}, {"name": "sidecar"}
#: The API server has the UID of a static pod's mirror, cgroups and runtime the hash of its file.
STATIC = {"pod_uid": "8f2c1d5e7a9b4c6d8e0f1a2b3c4d5e6f"}
MIRRORED = {"runtime_uid": STATIC["pod_uid"]}
NO_UID, NO_POD = {"pod_uid": None}, {"pod": None, "pod_uid": None}


@pytest.mark.parametrize(
    ("container", "tenant", "verdict"),
    [
        ({}, {}, "yes"),
        (OTHER_NAME, {}, "no"),
        (OTHER_UID, {}, "no"),
        (STATIC, {}, "no"),
        (STATIC, MIRRORED, "yes"),
        ({}, MIRRORED, "yes"),
        (STATIC, NO_UID | MIRRORED, "yes"),
        ({}, NO_UID | MIRRORED, "no"),
        ({}, NO_UID, "yes"),
        ({"pod": ("demo", "other")}, NO_UID, "no"),
        ({}, {"container": None}, "unclear"),
        (OTHER_UID, {"container": None}, "no"),
        ({}, {"container": None} | NO_POD, "unclear"),
        ({}, NO_POD, "unclear"),
        (OTHER_NAME, NO_POD, "no"),
    ],
)
def test_a_container_is_identified_by_pod_and_name(container: dict[str, Any], tenant: dict[str, Any], verdict: str) -> None:
    assert belongs(replace(CONTAINER, **container), replace(TENANT, **tenant)) == verdict


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
